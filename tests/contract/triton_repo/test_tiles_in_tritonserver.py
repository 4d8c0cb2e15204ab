"""Pictures of a LLaVA 1.6 through a real tritonserver: tokens and answers as of Transformers, by the picture's size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")
openai = pytest.importorskip("openai")

from pipelines.loadgen.run import run_benchmark  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from tests.contract.triton_repo.test_pictures_in_tritonserver import (  # noqa: E402
    NEW,
    ask,
    chat,
    image,
    part,
    served,
    write_seeing,
)
from tests.support.load_settings import benchmark, workload  # noqa: E402
from tests.support.served_gemma import Client  # noqa: E402
from tests.support.tiny_llava import GRIDS, whole_model  # noqa: E402

pytestmark = pytest.mark.thorough
SIZES = [(50, 50), (20, 90), (90, 20), (500, 700), (2, 3), (1, 60)]
MOST = 88


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("tiles") / "model", tiled=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    with served(folder.parent, folder, 4 * MOST) as running:
        yield running


@pytest.fixture(scope="module")
def chats(server: TritonServer) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.ports['openai_port']}/v1", api_key="-", max_retries=0)


def of_transformers(folder: Path, images: list[np.ndarray], text: str) -> tuple[str, int]:
    """Return a greedy answer and the tokens of its prompt, with Transformers' own processor of pictures."""
    from PIL import Image
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    square = {"height": 32, "width": 32}
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=square, image_grid_pinpoints=GRIDS)
    found = processor([Image.fromarray(each) for each in images], return_tensors="pt")
    model, tokenizer = whole_model(folder), transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        features = model.get_image_features(found["pixel_values"], image_sizes=found["image_sizes"]).pooler_output
    token, lengths = model.config.image_token_id, iter(map(len, features))
    ids = [
        each for one in tokenizer(text)["input_ids"] for each in ([token] * next(lengths) if one == token else [one])
    ]
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]), **found, max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return tokenizer.decode(out[0, len(ids) :]).strip(), len(ids)


@pytest.mark.parametrize("sizes", [[size] for size in SIZES] + [SIZES[:2], SIZES[4:]])
def test_chats_about_tiles_are_answered_as_by_transformers(
    chats: Any, folder: Path, sizes: list[tuple[int, int]]
) -> None:
    pictures = [image(sum(size), *size) for size in sizes]
    expected, tokens = of_transformers(
        folder, pictures, "USER: " + "<image>\n" * len(sizes) + "what is here ASSISTANT:"
    )
    answer = chat(chats, *map(part, pictures))
    assert answer.usage.prompt_tokens == tokens
    assert answer.choices[0].message.content.strip() == expected


def test_a_picture_that_makes_the_prompt_too_long_is_refused_once_it_is_decoded(
    chats: Any, server: TritonServer
) -> None:
    seen, small = part(image(1, 64, 64)), part(image(1, 2, 3))
    words = "a " * 90
    with pytest.raises(openai.BadRequestError, match=r"'messages' has \d+ tokens; this model takes 256"):
        chat(chats, seen, words=words)
    assert chat(chats, small, words=words).choices
    content = [{"type": "input_text", "text": words}, {"type": "input_image", "image_url": seen["image_url"]["url"]}]
    with pytest.raises(openai.BadRequestError, match=r"'input' has \d+ tokens; this model takes 256"):
        chats.responses.create(model="tiny_llava", input=[{"role": "user", "content": content}], max_output_tokens=4)


def test_grpc_takes_pictures_too_and_an_equal_one_reuses_blocks(server: TritonServer, chats: Any, folder: Path) -> None:
    both = [image(1, 20, 90), image(2, 20, 90)]
    answer = ask(Client(server.grpc_url), "<image> and <image>", image_bytes_input=np.stack(both)[None])
    assert answer.text.strip() == of_transformers(folder, both, "<image> and <image>")[0]
    first, again, other = (
        chat(chats, part(image(seed, 20, 90)), words="word " * 40).usage.prompt_tokens_details.cached_tokens
        for seed in (20, 20, 21)
    )
    assert (first, again > 0, other) == (0, True, 0)


@pytest.mark.parametrize(("interface", "side", "visual"), [("grpc", 300, MOST), ("grpc", 10, 36), ("chat", 300, MOST)])
def test_a_load_of_tiles_has_the_tokens_it_says(
    server: TritonServer, folder: Path, tmp_path: Path, interface: str, side: int, visual: int
) -> None:
    short = {"concurrency": [2], "duration_s": 0.5, "warmup_s": 0, "num_requests": 8}
    chat = {"url": f"http://127.0.0.1:{server.ports['openai_port']}/v1", "api": "chat"}
    load = benchmark(**short, **(chat if interface == "chat" else {}))
    result = run_benchmark(
        load.url or server.grpc_url, workload(isl=120, osl=4, images=1, image_side=side), load,
        labels={"model": "tiny_llava", "precision": "none"}, tokenizer_dir=folder.parent / "language", out_dir=tmp_path,
        visual_tokens=visual,
    )  # fmt: skip
    (level,) = result.levels
    assert level.summary.errors == {}
    assert (level.summary.isl.min, level.summary.isl.max) == (120, 120)
    assert not [note for note in level.notes if "counted other" in note]
