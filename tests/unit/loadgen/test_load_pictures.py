"""Pictures of a load: made from seeds, part of the input tokens, new in each request."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from pipelines.checkpoint.pictures import decode
from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError
from pipelines.loadgen.config import load_faults
from pipelines.loadgen.openai_endpoint import OpenAiInterface
from pipelines.loadgen.plan import LevelPlan, PlannedLevel, PlannedRequest
from pipelines.loadgen.prompts import IMAGE, PromptMaker, picture, png
from pipelines.loadgen.triton_stream import TritonInterface
from tests.conftest import ROOT
from tests.support.load_settings import benchmark, workload
from tests.unit.core.test_plan_llava import plan as make_plan

TOKENIZER = ROOT / "pipelines/bundled/models/tiny_llava"
VISUAL = 36


def plan(count: int | None = None, images: int = 1, **work):
    maker = PromptMaker(TOKENIZER, added_tokens=images * (VISUAL - 1), images=images)
    settings = workload(isl=100, osl=4, images=images, **work)
    return LevelPlan(PlannedLevel(1, "closed", 2, None), settings, benchmark(), maker).pool(count)


def test_a_file_is_the_picture_and_seeds_differ_in_every_square():
    pixels = picture(5, 50)
    assert (np.asarray(Image.open(io.BytesIO(png(pixels)))) == pixels).all()
    assert (decode(png(pixels)) == pixels).all()
    assert (pixels != picture(6, 50)).any(-1).mean() > 0.99
    assert (pixels == picture(5, 50)).all()


@pytest.mark.parametrize("images", [1, 2])
def test_pictures_are_part_of_the_input_tokens(images):
    tokenizer = opened(TOKENIZER).tokenizer
    seeds = set()
    for (request,) in plan(20, images):
        ids = tokenizer.encode(IMAGE * images + request.text).ids
        assert len(ids) + images * (VISUAL - 1) == request.isl == 100
        seeds |= set(request.images)
    assert len(seeds) == 20 * images


def test_turns_keep_their_picture_and_a_request_that_is_sent_again_gets_another():
    first, second = plan(2, turns=2)[0]
    assert first.images == second.images
    assert second.isl == 204
    assert len({*first.images, *first.renewed({}, 1).images, *first.renewed({}, 2).images}) == 3


def test_a_pool_of_pictures_is_bounded():
    assert len(plan(image_side=1024)) == 64
    with pytest.raises(UserError, match=r"1,000 requests with workload.images=2 have pictures of 5\.6 GiB"):
        plan(1000, images=2, image_side=1000)


def test_both_interfaces_send_them():
    request = PlannedRequest("two words", 100, 4, images=(3, 4), image_side=20)
    triton = TritonInterface("tensorrt_llm_bls", True, True, frozenset(), frozenset())
    message = triton.build(request, streaming=True, ignore_eos=False)
    places = {
        each.name: (list(each.shape), raw) for each, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    assert places["text_input"][1][4:] == b"<image><image>two words"
    assert places["image_bytes_input"] == ([1, 2, 20, 20, 3], picture(3, 20).tobytes() + picture(4, 20).tobytes())
    body = json.loads(OpenAiInterface("llava", "chat").build(request, streaming=True, ignore_eos=False).body)
    *images, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "two words"}
    urls = [each["image_url"]["url"].partition("base64,")[2] for each in images]
    assert [base64.b64decode(url) for url in urls] == [png(picture(seed, 20)) for seed in (3, 4)]


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"shared_prefix_share": 0.5}, "images=1 with shared_prefix_share=0.5: a new picture is before the text"),
        ({"trace": "t.csv"}, "images=1 with arrival=trace: a trace says every prompt itself"),
    ],
)
def test_what_does_not_go_with_pictures_is_refused(work, said):
    with pytest.raises(ValueError, match=said):
        workload(images=1, **work)


def test_completions_take_text_alone():
    (fault,) = load_faults(workload(images=1), benchmark(url="http://host:1/v1"))
    assert "workload.images=1 conflicts with benchmark.api=completions" in fault.message
    assert load_faults(workload(images=1), benchmark(url="http://host:1/v1", api="chat")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=tiny_llama"], r"workload.images=1, and tiny_llama reads text alone. Use model=tiny_llava"),
        (["model=tiny_llava", "workload.images=2"], r"workload.images=2 is more than multimodal.images_per_request=1"),
        (["model=tiny_llava", "workload.isl=36"], r"workload.isl=36 is to contain the 36 tokens of workload.images=1"),
        (
            ["model=tiny_llava", "engine=tensorrt_llm"],
            r"images=1 with engine=tensorrt_llm: NVIDIA's preprocessing takes no",
        ),
    ],
)
def test_pictures_that_fit_nothing_are_refused_in_the_plan(tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        make_plan(tmp_path, ["workload.images=1", *words], "benchmark")
