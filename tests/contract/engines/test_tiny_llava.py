"""The bundled LLaVA: scores of the engine against Transformers' LlavaForConditionalGeneration and its processor."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from eval.dataset import picture_questions
from eval.spec import IMAGE
from eval.tasks.load import picture_prompt
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.engines.pictures import ScoredPictures
from pipelines.engines.port import BuildLimits
from pipelines.settings.model import BUNDLED
from pipelines.stages.llava import BuildVision, TakeLanguageModel
from tests.contract.engines.conftest import CALIBRATION, widen
from tests.support.specs import quant_spec
from tests.support.tiny_llava import whole_model

FOLDER = BUNDLED / "models" / "tiny_llava"


@pytest.mark.thorough
def test_answers_of_the_bundled_llava_are_those_of_transformers(tmp_path: Path) -> None:
    """40 questions: the processor's ids and pixels through the whole model give the log probabilities of the engine."""
    TakeLanguageModel().run({"model": FOLDER}, tmp_path / "language", SilentProgress())
    facts = BuildVision().run({"vision": FOLDER}, tmp_path / "vision", SilentProgress())
    quantize(tmp_path / "language", tmp_path / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    limits = BuildLimits(8, 512, 512, 512, max_prompt_embedding_table_size=8 * facts["visual_tokens"])
    wide = widen(tmp_path / "checkpoint", tmp_path / "wide")
    OpenVinoEngine().build(wide, limits, tmp_path / "engine", SilentProgress())
    session = OpenVinoEngine(OpenVinoOptions(inference_precision="f32", num_threads=1)).open(tmp_path / "engine")
    pictures = ScoredPictures(tmp_path / "vision")
    session.see(pictures)
    whole, processor = whole_model(FOLDER), transformers.AutoProcessor.from_pretrained(FOLDER, use_fast=False)
    tokenizer, pairs, expected, right = processor.tokenizer, [], [], []
    for row in [row for rows in picture_questions().values() for row in rows[:10]]:
        image = base64.b64decode(row[IMAGE])
        prompt = pictures.placed(tokenizer.encode(picture_prompt(row)), image)
        words = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in row["choices"]]
        pairs += [(prompt, word) for word in words]
        opened = Image.open(io.BytesIO(image)).convert("RGB")
        given = processor(images=opened, text=picture_prompt(row), return_tensors="pt")
        with torch.no_grad():
            scores = whole(**given).logits[0, -1].log_softmax(-1)
        expected += [float(scores[word]) for (word,) in words]
        right.append(int(np.argmax(expected[-4:])) == row["answer"])
    found = [score for score, _ in session.loglikelihood(pairs, SilentProgress())]
    assert found == pytest.approx(expected, abs=1e-4)
    assert sum(right) > 0.8 * len(right)
