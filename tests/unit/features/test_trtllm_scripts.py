"""TensorRT-LLM's own scripts: the exact words, and what becomes of them, with a script that takes the same grammar."""

from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.run.console import plan_text
from pipelines.settings.compose import load
from pipelines.stages.quantize import Quantize
from pipelines.stages.script import Script, build_vision, convert_heads
from tests.unit.features.test_feature_inputs import plan

SAYS = """import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ({names}):
    parser.add_argument("--" + name, required=name.startswith(("model_dir", "base_", "drafter_", "output_dir")))
given = parser.parse_args()
{act}
"""
WRITES = """out = pathlib.Path(given.output_dir)
(out / "config.json").write_text(json.dumps({"architecture": "ARCHITECTURE"}))
for rank in range(int(given.tp_size)):
    (out / f"rank{rank}.safetensors").write_bytes(b"")
(out / "given.json").write_text(json.dumps(vars(given)))
"""
WORDS = {
    "medusa": "medusa_model_dir num_medusa_heads num_medusa_layers max_medusa_token_len",
    "redrafter": "drafter_model_dir redrafter_num_beams redrafter_draft_len_per_beam",
    "eagle": "eagle_model_dir max_draft_len num_eagle_layers",
}
"""Options of each script that are its own. Source: examples/{medusa@063e02f,redrafter@0e8b948,eagle@04a2cac}."""
MODEL = {"medusa": "model_dir", "redrafter": "base_model_checkpoint_dir", "eagle": "model_dir"}
BOTH = "output_dir dtype tp_size workers"
NAMES = {"medusa": "MedusaForCausalLM", "redrafter": "ReDrafterForLLaMALM", "eagle": "EagleForCausalLM"}


def script(folder: Path, mode: str, act: str) -> Path:
    """An examples folder whose script takes what the real one takes and then does `act`."""
    names = ", ".join(repr(word) for word in f"{MODEL[mode]} {BOTH} {WORDS[mode]}".split())
    (folder / mode).mkdir(parents=True)
    (folder / mode / "convert_checkpoint.py").write_text(SAYS.replace("{names}", names).replace("{act}", act))
    return folder


def stage(mode: str, examples: Path, tp_size: int = 2) -> Script:
    overrides = [f"speculative={mode}", "speculative.heads_path=/heads"]
    return convert_heads(load(overrides).speculative, tp_size, examples)


@pytest.mark.parametrize("mode", WORDS)
def test_the_script_takes_our_words_and_its_checkpoint_is_read_back(tmp_path: Path, mode: str) -> None:
    examples = script(tmp_path / "examples", mode, WRITES.replace("ARCHITECTURE", NAMES[mode]))
    out = tmp_path / "out"
    facts = stage(mode, examples).run({"model": tmp_path, "heads": tmp_path / "heads"}, out, SilentProgress())
    assert facts["script"] == f"{mode}/convert_checkpoint.py"
    assert (out / "rank1.safetensors").is_file()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("raise SystemExit('no such model')", r"medusa/convert_checkpoint\.py failed .*no such model"),
        (WRITES.replace("ARCHITECTURE", "LlamaForCausalLM"), r"wrote architecture=LlamaForCausalLM"),
        (WRITES.replace("given.tp_size", "1").replace("ARCHITECTURE", NAMES["medusa"]), r"ranks \[1\] are missing"),
        ("", r"wrote architecture=None"),
    ],
)
def test_what_a_script_did_wrong_is_said(tmp_path: Path, act: str, message: str) -> None:
    examples = script(tmp_path / "examples", "medusa", act)
    with pytest.raises(UserError, match=message):
        stage("medusa", examples).run({"model": tmp_path, "heads": tmp_path}, tmp_path / "out", SilentProgress())


def test_without_the_examples_the_run_says_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"paths\.trtllm_examples='.*' has no eagle/convert_checkpoint\.py"):
        stage("eagle", tmp_path).run({"model": tmp_path, "heads": tmp_path}, tmp_path / "out", SilentProgress())


def test_the_place_of_the_scripts_decides_no_bytes(tmp_path: Path) -> None:
    one, other = stage("eagle", tmp_path), stage("eagle", Path("/elsewhere"))
    assert one.identity() == other.identity() != stage("eagle", tmp_path, tp_size=1).identity()


def test_the_plan_shows_the_conversion_and_refuses_to_run_it_here(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "medusa_lm_head.pt").write_bytes(b"x")
    words = ["engine=tensorrt_llm", "model=llama_2_7b", "quant=none", "hardware=a100_sxm_80gb", "speculative=medusa"]
    made = plan(tmp_path, [*words, f"speculative.heads_path={tmp_path}/heads"], "build")
    assert [step.node.id for step in made.steps] == ["download", "convert", "build"]
    text = plan_text(made)
    assert "medusa/convert_checkpoint.py" in text
    assert "--num_medusa_heads 4" in text
    assert "--speculative_decoding_mode medusa" in text
    assert any("medusa_lm_head.pt" in str(warning) for warning in made.warnings)
    assert made.not_here


def test_redrafter_starts_from_the_models_own_checkpoint(tmp_path: Path) -> None:
    """Its script takes --base_model_checkpoint_dir, a TensorRT-LLM checkpoint in the type of the heads."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "model.safetensors").write_bytes(b"x")
    words = ["engine=tensorrt_llm", "model=llama_2_7b", "quant=none", "hardware=a100_sxm_80gb", "build.tp_size=2"]
    words += ["speculative=redrafter", f"speculative.heads_path={tmp_path}/heads", "build.max_batch_size=8"]
    steps = {step.node.id: step.node for step in plan(tmp_path, words, "build").steps}
    assert list(steps) == ["download", "quantize", "convert", "build"]
    quantize = steps["quantize"].stage
    assert isinstance(quantize, Quantize)
    assert (quantize.quant.dtype, quantize.tp_size) == ("float16", 2)
    assert steps["convert"].inputs["model"] == "quantize"


def test_the_examples_are_where_nvidias_container_has_them() -> None:
    """The last lines of its Dockerfile copy them to /app/examples."""
    assert load([]).paths.trtllm_examples == Path("/app/examples")


def test_the_vision_encoder_is_built_by_nvidias_script(tmp_path: Path) -> None:
    images = load(["multimodal=llava", "multimodal.path=/models/llava"]).multimodal
    words = build_vision(images, 8, tmp_path).command({"vision": "/models/llava"}, "/out")
    assert [word for part in words[1:] for word in part] == [
        *("--model_path", "/models/llava", "--output_dir", "/out"),
        *("--model_type", "llava", "--max_batch_size", "8"),
    ]
