"""A LLaVA folder through all stages: its parts against Transformers' LlavaForConditionalGeneration."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.prompt_table import PromptTable
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence
from pipelines.engines.openvino.vision import VisionEncoder
from pipelines.engines.pictures import ScoredPictures
from pipelines.stages.llava import BuildVision, TakeLanguageModel
from tests.contract.engines.conftest import CALIBRATION, LIMITS, relative_error, widen
from tests.support.scheduled import answers, asked, scheduler
from tests.support.specs import quant_spec
from tests.support.tiny_llava import TOKENS, picture, whole_model, write_llava

PLAIN = OpenVinoSettings(inference_precision="f32", num_threads=1)
TEXT = [2, 388, 774, 15, 27]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return whole_model(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> VisionEncoder:
    out = folder.parent / "vision"
    facts = BuildVision().run({"vision": folder}, out, SilentProgress())
    assert facts["visual_tokens"] == TOKENS
    return VisionEncoder(out, PLAIN)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Path:
    """Language model taken out, its checkpoint in float32, and its engine with room for two pictures."""
    root = folder.parent
    TakeLanguageModel().run({"model": folder}, root / "language", SilentProgress())
    quantize(root / "language", root / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    limits = replace(LIMITS, max_prompt_embedding_table_size=2 * TOKENS)
    OpenVinoEngine().build(widen(root / "checkpoint", root / "wide"), limits, root / "engine", SilentProgress())
    return root / "engine"


def ids_of(vocab_size: int) -> list[int]:
    return [TEXT[0], *range(vocab_size, vocab_size + TOKENS), *TEXT[1:]]


def expected_logits(whole: Any, pixels: np.ndarray) -> np.ndarray:
    """Return [T, V] of Transformers for one picture after the first token of the text."""
    token = whole.config.image_token_id
    ids = torch.tensor([[TEXT[0], *[token] * TOKENS, *TEXT[1:]]])
    with torch.no_grad():
        return whole(input_ids=ids, pixel_values=torch.from_numpy(pixels[None])).logits[0].numpy()


def test_features_are_those_of_transformers(whole: Any, encoder: VisionEncoder) -> None:
    pixels = np.stack([picture(1), picture(2)])
    with torch.no_grad():
        expected = whole.get_image_features(pixel_values=torch.from_numpy(pixels)).pooler_output
    expected = np.stack([each.numpy() for each in expected])
    assert relative_error(encoder.features(pixels), expected) < 1e-5


def test_the_language_model_is_that_of_the_folder(folder: Path, whole: Any, engine: Path) -> None:
    language = engine.parent / "language"
    alone = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        assert torch.equal(alone(ids).logits, whole(input_ids=ids).logits)
    assert json.loads((language / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not [name for name in load_file(language / "model.safetensors") if "vision" in name or "projector" in name]


def test_logits_are_those_of_transformers(whole: Any, encoder: VisionEncoder, engine: Path) -> None:
    loaded = EngineFolder.load(engine)
    stateful = StatefulModel(loaded, OpenVinoOptions(inference_precision="f32", num_threads=1))
    for seed in (1, 2):
        pixels = picture(seed)
        table = PromptTable(encoder.features(pixels[None])[0])
        (found,) = StatefulSequence(stateful, table).pieces(ids_of(loaded.config.vocab_size), all_logits=True)
        assert relative_error(found, expected_logits(whole, pixels)) < 1e-5


def test_pictures_in_flight_keep_to_their_requests(whole: Any, encoder: VisionEncoder, engine: Path) -> None:
    """Five pictures with the same question and the same ids; two of them fit at a time."""
    ids = ids_of(EngineFolder.load(engine).config.vocab_size)
    pixels = [picture(seed) for seed in range(5)]
    requests = [asked(ids, 1, table=PromptTable(encoder.features(each[None])[0])) for each in pixels]
    with scheduler(engine) as running:
        found = [channel.tokens[0] for channel in answers(running, requests)]
    assert found == [int(expected_logits(whole, each)[-1].argmax()) for each in pixels]


def test_full_features_and_the_last_layer(tmp_path: Path) -> None:
    """What other folders choose: the class token too, and the last layer."""
    folder = write_llava(tmp_path / "m", vision_feature_layer=-1, vision_feature_select_strategy="full")
    BuildVision().run({"vision": folder}, tmp_path / "vision", SilentProgress())
    pixels = picture(3)[None]
    with torch.no_grad():
        (expected,) = whole_model(folder).get_image_features(pixel_values=torch.from_numpy(pixels)).pooler_output
    assert relative_error(VisionEncoder(tmp_path / "vision", PLAIN).features(pixels)[0], expected.numpy()) < 1e-5


def test_pictures_of_another_size_are_refused(encoder: VisionEncoder) -> None:
    with pytest.raises(UserError, match=r"came as \[3, 16, 16\]. The encoder takes \[3, 32, 32\]"):
        encoder.features(np.zeros((1, 3, 16, 16), dtype=np.float32))
    with pytest.raises(UserError, match="NaN or infinite"):
        encoder.features(np.full((1, 3, 32, 32), np.nan, dtype=np.float32))


@pytest.mark.parametrize("names", ["model.language_model.", "language_model."])
def test_both_ways_to_name_tensors_are_read(folder: Path, tmp_path: Path, names: str) -> None:
    """Transformers 5 has other names in memory than in folders; converted folders have either."""
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    if names == "model.language_model.":
        tensors = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): values
            for name, values in tensors.items()
        }
        tensors = {
            name.replace("vision_tower.", "model.vision_tower.vision_model.", 1): values
            for name, values in tensors.items()
        }
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    TakeLanguageModel().run({"model": tmp_path}, tmp_path / "language", SilentProgress())
    BuildVision().run({"vision": tmp_path}, tmp_path / "vision", SilentProgress())
    expected = load_file(folder.parent / "language" / "model.safetensors")
    found = load_file(tmp_path / "language" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def png(seed: int, width: int = 40, height: int = 32) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_prompts_with_pictures_are_scored_as_transformers_does(
    whole: Any, encoder: VisionEncoder, engine: Path
) -> None:
    """Five pictures with the same words, each next to its own answers; one of them without a picture."""
    session = OpenVinoEngine(OpenVinoOptions(inference_precision="f32", num_threads=1)).open(engine)
    pictures = ScoredPictures(engine.parent / "vision")
    session.see(pictures)
    token, images = whole.config.image_token_id, [png(seed) for seed in range(5)]
    prompts = [pictures.placed([TEXT[0], token, *TEXT[1:]], image) for image in images]
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert pictures.placed([token], images[0])[0] == prompts[0][1]
    pairs = [(prompt, [answer]) for prompt in prompts for answer in (7, 9)] + [(TEXT, [7])]
    found = [score for score, _ in session.loglikelihood(pairs, SilentProgress())]
    expected = []
    for image in images:
        logits = torch.from_numpy(expected_logits(whole, encoder.prepared(image)[0])[-1])
        expected += [float(logits.log_softmax(-1)[answer]) for answer in (7, 9)]
    with torch.no_grad():
        expected.append(float(whole(input_ids=torch.tensor([TEXT])).logits[0, -1].log_softmax(-1)[7]))
    assert found == pytest.approx(expected, abs=1e-4)
    assert len(set(found[::2])) == 6  # so that a picture in another's place would show


def test_a_prompt_needs_one_place_for_its_picture(encoder: VisionEncoder, engine: Path) -> None:
    with pytest.raises(UserError, match="has 0 places for it"):
        ScoredPictures(engine.parent / "vision").placed(TEXT, png(0))


def test_an_engine_without_a_prompt_table_is_shown_no_pictures(encoder: VisionEncoder, engine: Path) -> None:
    OpenVinoEngine().build(engine.parent / "wide", LIMITS, engine.parent / "blind", SilentProgress())
    with pytest.raises(UserError, match="without a prompt table"):
        OpenVinoEngine().open(engine.parent / "blind").see(ScoredPictures(engine.parent / "vision"))
