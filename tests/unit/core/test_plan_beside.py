"""All that runs beside the CPU engine is in the plan: a draft model, the model with adapters, other processes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.plan.memory_checks import ENGINE, MemoryFit, check_cpu, cpu_needs
from pipelines.plan.plan import Plan, make_plan
from pipelines.plan.targets import Target
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.store import Store
from tests.support.adapters import write_adapter
from tests.unit.core.test_machine import MACHINE

DRAFT = ["speculative=draft_target", "model@speculative.draft=tiny_llama_draft"]


def plan(folder: Path, words: list[str], target: Target, memory_bytes: int = MACHINE.memory_bytes) -> Plan:
    settings = load(["engine=openvino", "model=tiny_llama", "quant=none", *words])
    return make_plan(settings, target, Store(folder / "store"), replace(MACHINE, memory_bytes=memory_bytes))


def adapters(folder: Path) -> list[str]:
    shape = ModelShape.from_hf_config(json.loads((BUNDLED / "models" / "tiny_llama" / "config.json").read_text()))
    size = shape.hidden_size
    matrices = {"0.self_attn.q_proj.lora_A": np.ones((2, size)), "0.self_attn.q_proj.lora_B": np.ones((size, 2))}
    write_adapter(folder, matrices)
    return ["lora=adapters", f"lora.adapters={{1:{folder},7:{folder}}}"]


def test_a_draft_model_and_adapters_are_listed_and_refused_by_the_sum(tmp_path: Path) -> None:
    words, pool = [*DRAFT, *adapters(tmp_path / "adapter")], "engine.openvino.kv_cache_bytes="
    made = plan(tmp_path, [*words, f"{pool}{GIB}"], "serve")
    needs = cpu_needs(made.deployment)
    name = "LoRA adapter {}, with the model once more"
    assert [*needs] == [ENGINE, "draft model", name.format(1), name.format(7), "tritonserver and this command"]
    for each, memory in needs.items():
        assert any(note.startswith(f"{each}: {show_bytes(memory.total)} (") for note in made.notes)
    engine, draft, adapter, *_ = needs.values()
    assert draft.kv_blocks == adapter.kv_blocks == engine.kv_blocks
    assert engine.own - adapter.own < engine.process  # the model again, but neither Python nor the libraries
    held = int(sum(each.process + each.weights + each.kv_pool for each in needs.values()))
    assert check_cpu(made.settings, needs, sum(each.own for each in needs.values())) == MemoryFit()
    assert check_cpu(made.settings, needs, held + 2**16).warnings
    with pytest.raises(UserError, match=r"needs .* draft model .* LoRA adapter 7") as refused:
        plan(tmp_path, [*words, f"{pool}{GIB}"], "serve", held - 2**22)
    (most,) = re.findall(r"kv_cache_bytes \(less than (\d+)\)", str(refused.value))
    assert plan(tmp_path, [*words, f"{pool}{most}"], "serve", held - 2**22).steps


def test_what_requests_for_logits_load_is_said_and_not_counted(tmp_path: Path) -> None:
    """Two bytes for each weight of the linears and the head, in float32 too, and what a layer takes."""
    shape = ModelShape.from_hf_config(json.loads((BUNDLED / "models" / "tiny_llama" / "config.json").read_text()))
    weights = 2 * (shape.linear_params + shape.vocab_size * shape.hidden_size)
    size = show_bytes(weights + 1.06 * 2**20 * shape.num_hidden_layers)
    note = f"the first request that needs logits (guides, seeds, bias) loads {size} more (modelled)"
    assert note in plan(tmp_path, [], "serve").notes
    assert not any("needs logits" in each for each in plan(tmp_path, [], "evaluate").notes)


def test_evaluating_loads_neither(tmp_path: Path) -> None:
    words = [*DRAFT, *adapters(tmp_path / "adapter")]
    assert [*cpu_needs(plan(tmp_path, words, "evaluate").deployment)] == [ENGINE, "lm-eval"]


def test_each_process_that_tokenizes_has_the_vocabulary(tmp_path: Path) -> None:
    """Of Qwen2.5's 151,936 tokens each copy takes 160 MiB: two in Triton, two in the OpenAI service."""
    words = ["serving.openai=true", "triton.preprocessing_instance_count=2"]
    shape = load(["model=qwen2_5_0_5b"]).model.shape
    assert shape is not None
    tiny = plan(tmp_path, words, "serve").deployment
    needs, wide = cpu_needs(tiny), cpu_needs(replace(tiny, shape=shape.to_shape()))
    more = 1100 * (shape.vocab_size - 1792)
    for name, copies in (("tritonserver and this command", 3), ("OpenAI service", 2)):
        assert wide[name].own - needs[name].own == copies * more
