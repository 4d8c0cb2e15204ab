"""Pictures through a real tritonserver: preprocessing, vision encoder, language model, called by the BLS."""

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")
pytest.importorskip("PIL")
openai = pytest.importorskip("openai")

from pipelines.compress.quantizing import quantize  # noqa: E402
from pipelines.domain.formats import QFormat  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402
from pipelines.engines.openvino.engine import OpenVinoEngine  # noqa: E402
from pipelines.loadgen.run import run_benchmark  # noqa: E402
from pipelines.serving.config import ServingSettings  # noqa: E402
from pipelines.serving.frontend import OpenAiFrontend  # noqa: E402
from pipelines.serving.process import TritonServer  # noqa: E402
from pipelines.stages.llava import BuildVision, TakeLanguageModel  # noqa: E402
from tests.contract.engines.conftest import CALIBRATION  # noqa: E402
from tests.support.load_settings import benchmark, workload  # noqa: E402
from tests.support.served_gemma import COMPUTES, LIMITS, Client  # noqa: E402
from tests.support.specs import quant_spec  # noqa: E402
from tests.support.tiny_llava import TOKENS, whole_model, write_llava  # noqa: E402
from triton_repo.config import TritonSettings  # noqa: E402
from triton_repo.parameters import ImageSpec, RepositorySpec  # noqa: E402
from triton_repo.write import write_repository  # noqa: E402

pytestmark = pytest.mark.thorough
NEW = 4
QUESTION = "what is in <image> here"
TEMPLATE = (  # as llava-1.5-7b-hf has it: pictures first, and no BOS, which the processor adds
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return write_seeing(root / "model")


def write_seeing(folder: Path, **choices: Any) -> Path:
    """Write a LLaVA with a chat template."""
    write_llava(folder, **choices)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(root: Path, folder: Path) -> Iterator[TritonServer]:
    """A server with room for two pictures in one request."""
    with served(root, folder, 4 * TOKENS) as running:
        yield running


@contextmanager
def served(root: Path, folder: Path, rows: int) -> Iterator[TritonServer]:
    """Take a LLaVA through all stages and serve it with so many rows of a prompt table."""
    silent = SilentProgress()
    TakeLanguageModel().run({"model": folder}, root / "language", silent)
    BuildVision().run({"vision": folder}, root / "vision", silent)
    quantize(root / "language", root / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    limits = replace(LIMITS, max_beam_width=1, max_prompt_embedding_table_size=rows)
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
    settings = ServingSettings(openai=True, image_hosts=("127.0.0.1:1", "localhost:1"))
    with TritonServer(root / "repository", settings) as running, OpenAiFrontend(running):
        yield running


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Client:
    return Client(server.grpc_url)


@pytest.fixture(scope="module")
def chats(server: TritonServer) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.ports['openai_port']}/v1", api_key="-", max_retries=0)


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


def part(pixels: np.ndarray, kind: str = "png") -> dict[str, Any]:
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return url(f"data:image/{kind};base64,{base64.b64encode(written.getvalue()).decode()}")


def url(text: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": text}}


def chat(chats: Any, *parts: dict[str, Any], words: str = "what is here", **more: Any) -> Any:
    messages = [{"role": "user", "content": [{"type": "text", "text": words}, *parts]}]
    plain = {"model": "tiny_llava", "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return chats.chat.completions.create(messages=messages, **plain, **more)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_chats_about_pictures_are_answered_as_by_transformers(chats: Any, folder: Path, count: int) -> None:
    pictures = [image(3, 70, 40), image(4)][:count]
    prompt = "USER: " + "<image>\n" * count + "what is here ASSISTANT:"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answer = chat(chats, *map(part, pictures))
    assert answer.usage.prompt_tokens == len(tokenizer(prompt)["input_ids"]) + count * (TOKENS - 1)
    if count:
        wanted = tokenizer.decode(expected(folder, pictures, prompt))
        assert answer.choices[0].message.content.strip() == wanted.strip()
    streamed = chat(chats, *map(part, pictures), stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in streamed) == answer.choices[0].message.content


def test_responses_and_the_other_parameters_take_pictures_too(chats: Any) -> None:
    seen = part(image(3))
    whole = chat(chats, seen, n=2, logprobs=True, top_logprobs=2)
    assert len({each.message.content for each in whole.choices}) == 1
    content = [
        {"type": "input_text", "text": "what is here"},
        {"type": "input_image", "detail": "auto", "image_url": seen["image_url"]["url"]},
    ]
    answer = chats.responses.create(
        model="tiny_llava", input=[{"role": "user", "content": content}], max_output_tokens=NEW, temperature=0
    )
    assert answer.usage.input_tokens == whole.usage.prompt_tokens
    assert whole.choices[0].message.content.startswith(answer.output_text)


def test_a_picture_asked_about_again_reuses_its_blocks_and_another_does_not(chats: Any) -> None:
    def cached(seed: int) -> int:
        words = "word " * 40
        return int(chat(chats, part(image(seed)), words=words).usage.prompt_tokens_details.cached_tokens)

    first, again, other = cached(20), cached(20), cached(21)
    assert (first, again > 0, other) == (0, True, 0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([url("data:image/png;base64,iVBORw0KGgo")], "Picture 1 is not whole base64: Incorrect padding"),
        ([url("data:image/png;base64,aGVsbG8=")], "Picture 1 is none: its 5 bytes are no PNG, JPEG, WEBP"),
        ([part(image(1)), url("data:image/png;base64,aGVsbG8=")], "Picture 2 is none"),
        ([url("data:image/gif;base64,aGVsbG8=")], "the URL 'data:image/gif;base64,.*it must start with data:image/png"),
        ([url("file:///etc/passwd")], "Picture 1 has the URL 'file:///etc/passwd'"),
        ([url("https://pictures.example/1.png")], "is at 'pictures.example'. .*from 127.0.0.1:1, localhost:1"),
        ([url("http://127.0.0.1:1/1.png")], "could not be fetched from '127.0.0.1:1': .*refused"),
        ([part(image(1))] * 3, "Pictures sent: 3; this repository takes 2"),
        ([part(np.zeros((1, 200, 3), np.uint8))], "has 200 x 1 pixels; its longer side may be 100 times"),
        ([{"type": "text", "text": "<image>"}], "Pictures sent: 0; places for them .* in the prompt: 1"),
        ([{"type": "image_url"}], "A picture has its URL in image_url"),
        ([{"type": "image_url", "image_url": {"url": "x", "detail": "high"}}], "'detail' = 'high'"),
        ([{"type": "input_audio"}], "Send text, or image_url in a user's message"),
    ],
)
def test_pictures_of_chats_that_cannot_be_used_are_named(chats: Any, parts: list[Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        chat(chats, *parts)
    assert chat(chats).choices[0].message.content


@pytest.mark.parametrize(("interface", "images"), [("grpc", 1), ("grpc", 2), ("chat", 1)])
def test_a_load_of_pictures_has_the_tokens_it_says(
    server: TritonServer, root: Path, tmp_path: Path, interface: str, images: int
) -> None:
    short = {"concurrency": [2], "duration_s": 0.5, "warmup_s": 0, "num_requests": 8}
    chat = {"url": f"http://127.0.0.1:{server.ports['openai_port']}/v1", "api": "chat"}
    load = benchmark(**short, **(chat if interface == "chat" else {}))
    result = run_benchmark(
        load.url or server.grpc_url, workload(isl=60, osl=4, images=images), load,
        labels={"model": "tiny_llava", "precision": "none"}, tokenizer_dir=root / "language", out_dir=tmp_path,
        visual_tokens=TOKENS,
    )  # fmt: skip
    (level,) = result.levels
    assert level.summary.errors == {}
    assert (level.summary.isl.min, level.summary.isl.max, level.summary.osl.max) == (60, 60, 4)
    assert not [note for note in level.notes if "counted other" in note or "KV cache" in note or "repeated" in note]
