"""A LLaVA 1.6 folder: features of tiles, arranged, against Transformers' LlavaNextForConditionalGeneration."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines.checkpoint.pictures import Pictures, decode
from pipelines.compress.quantizing import quantize
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
from tests.support.tiny_llava import whole_model, write_llava

OPTIONS = OpenVinoOptions(inference_precision="f32", num_threads=1)
TEXT = [2, 388, 774, 15, 27]
MOST = 88
SIZES = [(50, 50), (20, 90), (90, 20), (500, 700), (2, 3), (1, 60)]
"""Square, wide, tall, larger than every grid, tiny, one pixel high."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava") / "model", tiled=True, language="mistral")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return whole_model(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> VisionEncoder:
    out = folder.parent / "vision"
    assert BuildVision().run({"vision": folder}, out, SilentProgress())["visual_tokens"] == MOST
    return VisionEncoder(out, OpenVinoSettings(inference_precision="f32", num_threads=1))


@pytest.fixture(scope="module")
def engine(folder: Path, encoder: VisionEncoder) -> Path:
    """Language model taken out, its checkpoint in float32, and its engine with room for two pictures."""
    root = folder.parent
    TakeLanguageModel().run({"model": folder}, root / "language", SilentProgress())
    quantize(root / "language", root / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    limits = replace(LIMITS, max_prompt_embedding_table_size=2 * MOST)
    OpenVinoEngine().build(widen(root / "checkpoint", root / "wide"), limits, root / "engine", SilentProgress())
    return root / "engine"


def png(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def features(whole: Any, tiles: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return [visual tokens, H] of Transformers."""
    with torch.no_grad():
        found = whole.get_image_features(torch.from_numpy(tiles[None]), image_sizes=torch.tensor([size]))
    return np.asarray(found.pooler_output[0])


def expected_logits(whole: Any, tiles: np.ndarray, size: tuple[int, int], tokens: int) -> np.ndarray:
    """Return [T, V] of Transformers for one picture after the first token of the text."""
    ids = torch.tensor([[TEXT[0], *[whole.config.image_token_id] * tokens, *TEXT[1:]]])
    pixels, sizes = torch.from_numpy(tiles[None]), torch.tensor([size])
    with torch.no_grad():
        return whole(input_ids=ids, pixel_values=pixels, image_sizes=sizes).logits[0].numpy()


@pytest.mark.parametrize("size", SIZES)
def test_features_and_logits_of_tiles_are_those_of_transformers(
    whole: Any, encoder: VisionEncoder, engine: Path, size: tuple[int, int]
) -> None:
    tiles = encoder.prepared(png(size))
    table = encoder.table(encoder.features(tiles))
    placing = Pictures(engine.parent / "vision", engine, 1)
    ids = placing.places([TEXT[0], placing.token, *TEXT[1:]], [size])
    rows = np.array(ids[1 : -len(TEXT) + 1]) - EngineFolder.load(engine).config.vocab_size
    expected = features(whole, tiles, size)
    assert len(rows) == len(expected)
    assert relative_error(table[rows], expected) < 1e-5
    stateful = StatefulModel(EngineFolder.load(engine), OPTIONS)
    (found,) = StatefulSequence(stateful, PromptTable(table)).pieces(ids, all_logits=True)
    assert relative_error(found, expected_logits(whole, tiles, size, len(rows))) < 1e-5


def test_requests_and_scores_with_tiles_are_those_of_transformers(
    whole: Any, encoder: VisionEncoder, engine: Path
) -> None:
    """Pictures of different numbers of tokens beside each other."""
    placing, pictures = Pictures(engine.parent / "vision", engine, 1), ScoredPictures(engine.parent / "vision")
    requests, pairs, first, scores = [], [], [], []
    for size in SIZES:
        image, prompt = png(size), [TEXT[0], placing.token, *TEXT[1:]]
        tiles, placed = encoder.prepared(image), placing.places(prompt, [size])
        requests.append(asked(placed, 1, table=PromptTable(encoder.table(encoder.features(tiles)))))
        pairs.append((pictures.placed(prompt, image), [7]))
        assert decode(image).shape[:2] == size
        logits = torch.from_numpy(expected_logits(whole, tiles, size, len(placed) - len(TEXT))[-1])
        first.append(int(logits.argmax()))
        scores.append(float(logits.log_softmax(-1)[7]))
    with scheduler(engine) as running:
        assert [channel.tokens[0] for channel in answers(running, requests)] == first
    session = OpenVinoEngine(OPTIONS).open(engine)
    session.see(pictures)
    found = [score for score, _ in session.loglikelihood(pairs, SilentProgress())]
    assert found == pytest.approx(scores, abs=1e-4)
    assert len({round(score, 6) for score in found}) == len(SIZES)  # so that a picture in another's place would show
