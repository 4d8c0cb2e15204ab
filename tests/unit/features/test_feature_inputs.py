"""What features name on disk is looked at while planning: adapters, draft models, trained heads."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.plan.plan import Plan, make_plan
from pipelines.plan.targets import Goal
from pipelines.plan.user_inputs import inspect_inputs, same_vocabulary
from pipelines.run.gpu_commands import gpu_commands
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.manifest import HashCache
from pipelines.store.sources import adapter_source, files_source, model_source
from pipelines.store.store import Store
from tests.unit.core.test_plan import MACHINE

GEMMA, LLAMA = BUNDLED / "models" / "tiny_gemma", BUNDLED / "models" / "tiny_llama"


def write_adapter(folder: Path, *, rank: int = 4, inputs: int | None = None, **config: object) -> Path:
    """A peft adapter of q_proj with zeros, for tiny_gemma unless `inputs` says otherwise."""
    shape = json.loads((GEMMA / "config.json").read_text())
    hidden, out = inputs or shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": "all-linear", "r": rank, **config})
    )
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    sizes = {f"{prefix}.lora_A.weight": [rank, hidden], f"{prefix}.lora_B.weight": [out, rank]}
    header, begin = {}, 0
    for name, (rows, columns) in sizes.items():
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, begin + 4 * rows * columns]}
        begin += 4 * rows * columns
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))
    return folder


def plan(tmp_path: Path, overrides: list[str], target: str = "repository") -> Plan:
    return make_plan(load(overrides), target, Store(tmp_path / "store"), MACHINE)  # type: ignore[arg-type]


def hashes(tmp_path: Path) -> HashCache:
    return Store(tmp_path / "store").hashes


def test_heads_whose_link_leads_nowhere_are_named(tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text("{}")
    (heads / "medusa.safetensors").symlink_to(tmp_path / "moved.safetensors")
    with pytest.raises(
        UserError,
        match=r"heads_path='.*heads': medusa\.safetensors -> '.*moved\.safetensors' cannot be read \(No such file",
    ):
        plan(
            tmp_path,
            [
                "engine=tensorrt_llm",
                "hardware=h100_sxm",
                "model=tiny_llama",
                "quant=none",
                "speculative=medusa",
                f"speculative.heads_path={heads}",
            ],
        )


def test_a_file_that_vanishes_while_it_is_read_is_named(tmp_path: Path) -> None:
    class Hashes(HashCache):
        def sha256(self, path: Path) -> str:
            path.unlink()
            return super().sha256(path)

    for place in (tmp_path / "folder" / "heads.safetensors", tmp_path / "text.jsonl"):
        place.parent.mkdir(exist_ok=True)
        place.touch()
        given = place.parent if place.parent != tmp_path else place
        with pytest.raises(UserError, match=rf"the.key='{given}': {place.name} cannot be read \(No such file"):
            files_source(given, Hashes(tmp_path / "hashes.json"), "the.key")


def test_weights_whose_link_leads_nowhere_are_named(tmp_path: Path) -> None:
    """As a Hugging Face cache looks after its blobs were cleaned away."""
    folder = tmp_path / "model"
    shutil.copytree(GEMMA, folder)
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(UserError, match=r"model\.path='.*model': model\.safetensors -> '.*gone' cannot be read"):
        model_source(folder, hashes(tmp_path))
    assert model_source(folder, hashes(tmp_path), weights=False)[1].vocab_size == 1920


def test_an_adapter_tells_its_rank_and_linears(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", rank=4)
    _, adapter = adapter_source(folder, hashes(tmp_path), "lora.adapters.1")
    assert (adapter.rank, adapter.modules, adapter.trtllm_modules, adapter.layers) == (4, ("q_proj",), ("attn_q",), 1)


def test_adapters_become_inputs_of_the_repository(tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", rank=8)
    made = plan(tmp_path, ["quant=none", "lora=adapters", f"lora.adapters={{1:{one},7:{two}}}"])
    inputs = made.steps[-1].node.inputs
    assert {"lora.1", "lora.7"} <= inputs.keys()
    assert inputs["lora.1"] != inputs["lora.7"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda a: (a / "adapter_config.json").unlink(),
            r"adapters\.1='.*' is not an adapter: it has no adapter_config",
        ),
        (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda a: (a / "adapter_config.json").write_text("[]"), "adapter_config.json is not a JSON object"),
        (lambda a: (a / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (
            lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
            "has no adapter_model.safetensors, only pickled weights",
        ),
        (
            lambda a: shutil.copy(GEMMA / "model.safetensors", a / "adapter_model.safetensors"),
            "adapter_model.safetensors holds 'model.*weight', which is no LoRA matrix",
        ),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path, spoil, message: str) -> None:
    folder = write_adapter(tmp_path / "a")
    spoil(folder)
    with pytest.raises(UserError, match=message):
        plan(tmp_path, ["lora=adapters", f"lora.adapters={{1:{folder}}}"])


def test_every_fault_of_every_adapter_is_told_at_once(tmp_path: Path) -> None:
    foreign, other = write_adapter(tmp_path / "a", inputs=77), write_adapter(tmp_path / "b", rank=5)
    adapters = f"lora.adapters={{1:{foreign},2:{other}}}"
    with pytest.raises(UserError) as caught:
        plan(tmp_path, ["quant=none", "lora=adapters", adapters, "lora.max_rank=3"])
    text = "\n".join(str(fault) for fault in caught.value.faults)
    assert "its model.layers.0.self_attn.q_proj has 77 inputs" in text
    assert "has rank 4, more than lora.max_rank=3" in text
    assert "has rank 5, more than lora.max_rank=3" in text


def test_a_draft_model_is_quantized_and_built_beside_its_target(tmp_path: Path) -> None:
    made = plan(tmp_path, ["quant=fp8", "speculative=draft_target"], "build")
    assert [step.node.id for step in made.steps] == ["quantize", "build", "draft.quantize", "draft.build"]
    served = plan(tmp_path, ["quant=fp8", "speculative=draft_target"])
    assert served.steps[-1].node.inputs["draft_engine"] == "draft.build"


def test_a_draft_model_answers_like_any_engine(tmp_path: Path) -> None:
    """It checks no drafts of its own, so it is not built to."""
    build = plan(tmp_path, ["speculative=draft_target"], "build").steps[-1].node.stage.build  # type: ignore[attr-defined]
    assert (build.speculative_decoding_mode, build.max_draft_len) == (None, 0)


def test_the_baseline_guesses_nothing(tmp_path: Path) -> None:
    """What is built for comparison is the plain model: its engine is that of every other deployment of it."""
    words = ["engine=tensorrt_llm", "quant=fp8"]
    for mode, model in (("lookahead", "tiny_llama"), ("draft_target", "tiny_gemma")):
        given = [*words, f"model={model}", f"speculative={mode}"]
        steps = {step.node.id: step for step in plan(tmp_path, given, "evaluate").steps}
        built = {name: steps[name].node.stage.build for name in ("baseline.build", "build")}  # type: ignore[attr-defined]
        assert built["build"].speculative_decoding_mode is not None
        assert built["build"].max_draft_len > 0
        assert (built["baseline.build"].speculative_decoding_mode, built["baseline.build"].max_draft_len) == (None, 0)


@pytest.mark.parametrize(
    ("given", "target", "draft"),
    [
        (["model=llama_3_8b"], 8192, 8192),
        (["model=llama_3_1_8b"], 131072, 131072),
        (["model=llama_3_8b", "build.max_seq_len=4096"], 4096, 4096),
        (["model=llama_3_1_8b", "hardware=h100_sxm"], 4096, 4096),  # chosen for the load
    ],
)
def test_a_draft_is_built_for_no_longer_sequences_than_its_target(
    tmp_path: Path, given: list[str], target: int, draft: int
) -> None:
    """Llama 3 8B was made for 8,192 tokens, the draft for 131,072: tables and activations for those would be wasted."""
    words = ["engine=tensorrt_llm", "quant=fp8", "speculative=draft_target", *given]
    words += ["model@speculative.draft=llama_3_2_1b"]
    text = "\n".join(gpu_commands(plan(tmp_path, words, "build")))
    first, _, rest = text.partition("draft.build")
    assert f"--max_seq_len {target} " in first.replace("\n", " ")
    assert f"--max_seq_len {draft} " in rest.replace("\n", " ")


def test_the_accuracy_needs_no_draft_model(tmp_path: Path) -> None:
    made = plan(tmp_path, ["quant=fp8", "speculative=draft_target"], "evaluate")
    assert not any(step.node.id.startswith("draft") for step in made.steps)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"speculative\.draft .*tiny_llama"):
        plan(tmp_path, ["model=tiny_llama", "speculative=draft_target", "speculative.draft.bundled=tiny_gemma"])


def test_a_draft_model_of_the_hub_is_downloaded_first(tmp_path: Path) -> None:
    made = plan(
        tmp_path, ["speculative=draft_target", "model=llama_3_8b", "model@speculative.draft=llama_3_2_1b"], "build"
    )
    assert "download.draft" in [step.node.id for step in made.steps]


def test_a_draft_that_cannot_be_split_like_its_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"speculative\.draft: tp_size=3 does not divide num_attention_heads=2"):
        plan(tmp_path, ["speculative=draft_target", "build.tp_size=3"])


@pytest.mark.parametrize(("change", "same"), [(lambda raw: raw, True), (lambda raw: raw["added_tokens"].pop(), False)])
def test_vocabularies_are_compared_by_their_tokens(tmp_path: Path, change, same: bool) -> None:
    """A file that is laid out otherwise has the same tokens; one token less is another vocabulary."""
    raw = json.loads((GEMMA / "tokenizer.json").read_text())
    change(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw, indent=3))
    assert same_vocabulary(GEMMA, tmp_path) is same


def test_what_is_not_on_disk_is_not_compared(tmp_path: Path) -> None:
    assert same_vocabulary(None, GEMMA) is None
    assert same_vocabulary(GEMMA, tmp_path) is None


def test_a_server_elsewhere_needs_no_feature_of_ours(tmp_path: Path) -> None:
    settings = load(["benchmark.url=host:8001", "lora=adapters", "lora.adapters={1:/no/such}"])
    assert inspect_inputs(Goal(settings, "benchmark"), hashes(tmp_path)).adapters == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speculative=medusa"], r"mode 'medusa' needs speculative\.heads_path="),
        (["speculative.mode=draft_target"], r"mode 'draft_target' needs speculative\.draft="),
        (["multimodal.model_type=llava"], r"model_type 'llava' needs multimodal\.path="),
        (
            ["lora.adapters={0:/a}"],
            r"lora\.adapters has the key '0', which is not valid: .* greater than or equal to 1",
        ),
        (["lora.target_modules=[q_proj]"], r"lora\.target_modules.*q_proj.*attn_q"),
    ],
)
def test_a_feature_that_is_not_whole_says_what_it_needs(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["speculative=lookahead"], "max_draft_len", 83),  # 5 + (6 + 7) * 6
        (["speculative=lookahead", "triton.lookahead_ngram_size=2"], "max_draft_len", 13),  # 0 + (6 + 7) * 1
        (["speculative=redrafter", "speculative.heads_path=/h", "speculative.num_beams=4"], "max_draft_len", 20),
        (["multimodal=llava", "multimodal.path=/m"], "max_prompt_embedding_table_size", 4608),  # 8 * 576
        (["lora=adapters", "lora.adapters={1:/a}", "lora.max_rank=16"], "max_lora_rank", 16),
        (["parallel=tp4"], "workers", 4),
        (["sparsity=sparsegpt_2_4"], "gemm_plugin", "disable"),
        (["weights=streaming"], "weight_streaming", True),
    ],
)
def test_a_feature_sets_what_it_needs_of_the_build(overrides: list[str], key: str, value: object) -> None:
    assert load(overrides).build[key] == value


def test_the_command_line_has_the_last_word_over_a_feature() -> None:
    assert load(["speculative=draft_target", "build.max_batch_size=7"]).build.max_batch_size == 7
