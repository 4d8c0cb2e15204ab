"""LoRA adapters on the CPU engine: exactly peft's arithmetic, several in one batch, and refused where not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.engines.openvino.lora import LoraAdapter, read_adapters
from pipelines.engines.openvino.pipeline import open_pipeline
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.scoring import Scorer
from pipelines.engines.openvino.stateful import StatefulModel
from pipelines.settings.model import BUNDLED
from scripts.zoo.lora import ADAPTERS
from scripts.zoo.quiz import LETTERS, build_splits, description, question_text
from scripts.zoo.world import build_world
from tests.contract.engines.conftest import (
    MODELS,
    Workshop,
    as_exported,
    relative_error,
    torch,
    torch_logits,
    transformers,
)
from tests.support.scheduled import answers, asked, scheduler
from tests.support.scored_logits import scored_logits

peft = pytest.importorskip("peft")
FOLDERS = {1: "next_letter", 2: "in_words"}
FOLDER = BUNDLED / "adapters"
F32 = OpenVinoOptions(inference_precision="f32", num_threads=1)


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled adapters as TensorRT-LLM's lora_prefetch_dir has them."""
    root = tmp_path_factory.mktemp("lora")
    for task, name in FOLDERS.items():
        shutil.copytree(FOLDER / name, root / str(task))
    return root


@pytest.fixture(scope="module")
def engine(workshop: Workshop) -> Path:
    return workshop.engine(workshop.float32_checkpoint("gemma"))


def with_peft(workshop: Workshop, name: str) -> Any:
    """The bundled model with an adapter, in peft."""
    return peft.PeftModel.from_pretrained(
        as_exported(workshop.plain("gemma", torch.float32), "gemma"), FOLDER / name
    ).eval()


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_peft_and_of_merged_weights(workshop: Workshop, engine: Path, name: str) -> None:
    batch, folder = workshop.batch("gemma")[:2], EngineFolder.load(engine)
    scorer = Scorer(folder, StatefulModel(replace(folder, adapter=LoraAdapter.read(FOLDER / name)), F32))
    found = np.stack([scored_logits(scorer, row.tolist()) for row in batch])
    model = with_peft(workshop, name)
    assert relative_error(found, torch_logits(model, batch)) < 1e-5
    assert relative_error(found, torch_logits(model.merge_and_unload(), batch)) < 1e-5
    plain = Scorer(folder, StatefulModel(folder, F32))
    assert relative_error(found, np.stack([scored_logits(plain, row.tolist()) for row in batch])) > 0.1


def quiz(count: int) -> tuple[list[list[int]], list[Any]]:
    """Token ids of questions without examples, and the questions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "tiny_gemma")
    questions = [splits.test[0] for splits in build_splits(build_world()).values()][:count]
    return [tokenizer(description(one.subject) + question_text(one))["input_ids"] for one in questions], questions


def test_two_adapters_and_none_answer_together_each_in_its_way(
    workshop: Workshop, engine: Path, lora_dir: Path
) -> None:
    """18 requests at once; the same prompt thrice, so that reused KV blocks of another adapter would be seen."""
    prompts, questions = quiz(6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "tiny_gemma")
    ways = {
        None: lambda question: question.letter,
        1: lambda question: LETTERS[(question.answer + 1) % 4],
        2: lambda question: question.choices[question.answer],
    }
    with scheduler(engine, read_adapters(lora_dir)) as running:
        for _ in range(2):
            requests = [asked(prompt, 6, lora_task_id=task) for prompt in prompts for task in ways]
            found = iter(answers(running, requests))
            for question in questions:
                for task, way in ways.items():
                    assert tokenizer.decode(next(found).tokens).split()[0] == way(question), task
        bias = np.zeros(1920, dtype=np.float32)
        bias[5] = 1e-3
        how: list[dict[str, Any]] = [{}, {"bias": bias}, {"context_log_probs": 1}]
        paged, own, scored = answers(running, [asked(prompts[0], 6, lora_task_id=2, **more) for more in how])
    assert own.tokens == paged.tokens  # requests that need logits run elsewhere, with the adapter too
    model = with_peft(workshop, "in_words")
    with torch.no_grad():
        expected = model.generate(input_ids=torch.tensor([prompts[0]]), max_new_tokens=6, do_sample=False)
    answer = expected[0, len(prompts[0]) :].tolist()  # it ends with <eos>, which nobody asked the engine to stop at
    assert paged.tokens[: len(answer)] == answer
    assert scored.prompt is not None
    logits = torch.from_numpy(torch_logits(model, np.array([prompts[0]]))).double()
    expected = torch.log_softmax(logits[0], dim=-1)[range(len(prompts[0]) - 1), prompts[0][1:]]
    assert np.abs(scored.prompt.log_probs - expected.numpy()).max() < 1e-3


@pytest.mark.parametrize("qformat", [pytest.param(QFormat.INT8_WO, marks=pytest.mark.thorough), QFormat.INT4_WO])
def test_weights_may_be_quantized_when_activations_are_not(workshop: Workshop, qformat: QFormat) -> None:
    prompts, questions = quiz(6)
    engine = workshop.engine(workshop.checkpoint("gemma", qformat))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "tiny_gemma")
    with scheduler(engine, {1: LoraAdapter.read(FOLDER / "next_letter")}) as running:
        found = answers(running, [asked(prompt, 1, lora_task_id=1) for prompt in prompts])
    letters = [tokenizer.decode(one.tokens).strip() for one in found]
    wanted = [LETTERS[(question.answer + 1) % 4] for question in questions]
    assert sum(a == b for a, b in zip(letters, wanted, strict=True)) >= 5


@pytest.mark.parametrize("qformat", [QFormat.FP8, QFormat.INT4_AWQ])
def test_formats_that_change_activations_are_refused(workshop: Workshop, qformat: QFormat) -> None:
    folder = EngineFolder.load(workshop.engine(workshop.checkpoint("gemma", qformat)))
    with pytest.raises(UserError, match=rf"next_letter is not possible with {qformat}.*none, .*int8_wo, int4_wo"):
        open_pipeline(replace(folder, adapter=LoraAdapter.read(FOLDER / "next_letter")), F32)


def test_an_adapter_of_another_model_is_refused(workshop: Workshop) -> None:
    folder = EngineFolder.load(workshop.engine(workshop.checkpoint("llama", QFormat.NONE)))
    with pytest.raises(UserError, match=r"is for a weight of shape \[\d+, \d+\]; the engine's is \[\d+, \d+\]"):
        open_pipeline(replace(folder, adapter=LoraAdapter.read(FOLDER / "next_letter")), F32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, r"use_dora=True\. Allowed: null, false"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ],
)
def test_what_is_more_than_two_matrices_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = shutil.copytree(FOLDER / "in_words", tmp_path / "1")
    config = json.loads((folder / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        LoraAdapter.read(folder)


def test_scaling_follows_rank_stabilization_and_patterns(tmp_path: Path) -> None:
    """Alpha 16 / rank 8 = 2; 16 / sqrt(8) when stabilized; 4 / sqrt(8) for q_proj by its pattern."""
    folder = shutil.copytree(FOLDER / "in_words", tmp_path / "1")
    raw = load_file(folder / "adapter_model.safetensors")
    b = raw["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    v = raw["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"]
    np.testing.assert_allclose(LoraAdapter.read(folder).branches["model.layers.0.self_attn.q_proj"][1], 2 * b)
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"use_rslora": True, "alpha_pattern": {"q_proj": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    read = LoraAdapter.read(folder)
    np.testing.assert_allclose(read.branches["model.layers.0.self_attn.q_proj"][1], b * (4 / 8**0.5), rtol=1e-6)
    np.testing.assert_allclose(read.branches["model.layers.0.self_attn.v_proj"][1], v * (16 / 8**0.5), rtol=1e-6)


def test_folders_that_hold_no_adapter_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere' holds no adapters"):
        read_adapters(tmp_path / "nowhere")
    (tmp_path / "a" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match="first is not a LoRA task id"):
        read_adapters(tmp_path / "a")
    (tmp_path / "b" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"3' is not an adapter: it has no adapter_config\.json"):
        read_adapters(tmp_path / "b")
    extra = shutil.copytree(FOLDER / "in_words", tmp_path / "c" / "1")
    raw = load_file(extra / "adapter_model.safetensors")
    save_file(
        raw | {"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, extra / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match=r"holds 'base_model.model.lm_head.weight'"):
        read_adapters(tmp_path / "c")
