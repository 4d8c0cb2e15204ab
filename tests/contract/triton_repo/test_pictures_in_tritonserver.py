"""Pictures through a real tritonserver: preprocessing, vision encoder, language model, called by the BLS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")
pytest.importorskip("PIL")

from pipelines.compress.quantizing import quantize  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.openvino.engine import OpenVinoEngine  # noqa: E402
from pipelines.serving.config import ServingSettings  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from pipelines.stages.llava import BuildVision, TakeLanguageModel  # noqa: E402
from tests.contract.engines.conftest import CALIBRATION  # noqa: E402
from tests.support.served_gemma import COMPUTES, LIMITS, Client  # noqa: E402
from tests.support.specs import quant_spec  # noqa: E402
from tests.support.tiny_llava import TOKENS, whole_model, write_llava  # noqa: E402
from triton_repo.config import TritonSettings  # noqa: E402
from triton_repo.parameters import ImageSpec, RepositorySpec  # noqa: E402
from triton_repo.write import write_repository  # noqa: E402

pytestmark = pytest.mark.thorough
NEW = 4
QUESTION = "what is in <image> here"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return write_llava(root / "model")


@pytest.fixture(scope="module")
def client(root: Path, folder: Path) -> Iterator[Client]:
    """A server with room for two pictures in one request."""
    silent = SilentProgress()
    TakeLanguageModel().run({"model": folder}, root / "language", silent)
    BuildVision().run({"vision": folder}, root / "vision", silent)
    quantize(root / "language", root / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    limits = replace(LIMITS, max_beam_width=1, max_prompt_embedding_table_size=4 * TOKENS)
    OpenVinoEngine().build(root / "checkpoint", limits, root / "engine", silent)
    spec = RepositorySpec(
        flavour="openvino",
        label="tiny_llava",
        variant="none",
        images=ImageSpec("llava", "", 2),
        options=COMPUTES.model_dump(exclude_unset=True),
    )
    write_repository(
        root / "repository",
        engine_dir=root / "engine",
        tokenizer_dir=root / "language",
        settings=TritonSettings(exclude_input_in_output=True),
        spec=spec,
        vision_dir=root / "vision",
    )
    with TritonServer(root / "repository", ServingSettings()) as server:
        yield Client(server.grpc_url)


def image(seed: int, height: int = 48, width: int = 40) -> np.ndarray:
    """Return a picture with a gradient and noise, uint8 [height, width, 3]."""
    random = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    return (random + np.linspace(0, 130, width, dtype=np.int64)[None, :, None]).astype(np.uint8)


def expected(folder: Path, images: list[np.ndarray], text: str) -> list[int]:
    """Return what Transformers generates greedily, with its own processor of pictures."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    model = whole_model(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token = model.config.image_token_id
    ids = [each for one in tokenizer(text)["input_ids"] for each in ([token] * TOKENS if one == token else [one])]
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]), pixel_values=pixels, max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return out[0, len(ids) :].tolist()


def ask(client: Client, text: str = QUESTION, **inputs: Any) -> Any:
    return client.ask("tensorrt_llm_bls", text_input=text, max_tokens=NEW, end_id=-1, **inputs)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_about_pictures_are_those_of_transformers(client: Client, folder: Path, stream: bool) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    both = [image(1), image(2)]
    for pictures, text in (both[:1], QUESTION), (both[1:], QUESTION), (both, "<image> and <image>"):
        answer = ask(client, text, image_bytes_input=np.stack(pictures)[None], stream=stream)
        assert answer.text.strip() == tokenizer.decode(expected(folder, pictures, text)).strip()


def test_text_alone_is_answered_too(client: Client) -> None:
    assert ask(client, "what is here").text


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"image_bytes_input": image(1)[None, None, :, :, :1]}, "must be [pictures, height, width, 3]"),
        ({"image_bytes_input": np.stack([image(1)] * 3)[None]}, "Pictures sent: 3; this repository takes 2"),
        (
            {"image_bytes_input": image(1)[None, None], "text": "no place"},
            "Pictures sent: 1; places for them (<image>)",
        ),
        ({"image_bytes_input": np.zeros((1, 1, 4097, 4097, 3), np.uint8)}, "4097 x 4097 pixels; at most 16,777,216"),
        ({"image_url_input": "http://pictures/1.png"}, "pictures are taken as image_bytes_input alone"),
        ({}, "Pictures sent: 0; places for them (<image>) in the prompt: 1"),
    ],
)
def test_pictures_that_fit_nothing_are_named(client: Client, inputs: dict[str, Any], said: str) -> None:
    assert said in ask(client, **inputs).error
