"""Adapters that peft wrote: both engines compute what peft computes of the same folder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.domain.adapter import FIELDS
from pipelines.domain.errors import UserError
from pipelines.engines.openvino.lora import LoraAdapter
from tests.contract.engines.conftest import torch, transformers
from triton_repo.write import convert

peft = pytest.importorskip("peft")
LINEARS = ["q_proj", "v_proj", "down_proj"]


def test_every_field_of_pefts_configuration_is_in_the_table() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(peft.LoraConfig)}


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=32
    )
    return transformers.LlamaForCausalLM(config).eval()


def saved(folder: Path, **config: Any) -> Path:
    """An adapter with random matrices, as peft saves it."""
    model = peft.get_peft_model(base(), peft.LoraConfig(**{"r": 2, "target_modules": LINEARS, **config}))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


EXTRA: dict[str, dict[str, Any]] = {
    "plain": {},
    "stabilized": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "rank_pattern": {r"layers\.[01]\.self_attn\.q_proj": 4, "q_proj": 6, "^model.layers.2.mlp.*": 3},
        "alpha_pattern": {r".*\.2\..*": 5, "v_proj": 1, "model.layers.2.self_attn.v_proj": 99, "proj": 77},
    },
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers", "exclude_modules": ["0.mlp.down_proj"]},
    "expression": {"target_modules": r".*\.(0|2)\.self_attn\.[qk]_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded by expression": {"exclude_modules": r".*\.1\..*"},
    "named in full": {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]},
    "one layer": {"layers_to_transform": 1},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "unread": {"lora_dropout": 0.5, "megatron_core": "other", "qalora_group_size": 4, "revision": "main"},
}


@pytest.mark.parametrize("name", EXTRA)
def test_both_engines_have_pefts_change_of_every_weight(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / name, **EXTRA[name])
    plain = base()
    model = peft.PeftModel.from_pretrained(base(), folder).eval()
    x = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        wanted, before = model(input_ids=x).logits, plain(input_ids=x).logits
    assert float((wanted - before).abs().max()) > 1e-3
    branches = LoraAdapter.read(folder).branches
    weights, rows = convert(folder, "float32")
    assert sorted(rows[0, :, 2]) == sorted(len(a) for a, _ in branches.values())
    for module, (a, b) in branches.items():
        plain.get_submodule(module).weight.data += torch.from_numpy(b @ a)
    with torch.no_grad():
        np.testing.assert_allclose(plain(input_ids=x).logits, wanted, atol=1e-5)
    flat = {tuple(np.concatenate([a.reshape(-1), b.reshape(-1)])) for a, b in branches.values()}
    assert {tuple(row[row != 0]) for row in weights[0]} == flat


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_modules": None}, r"target_modules=\['q_proj', 'v_proj'\], which leaves out .*down_proj"),
        ({"target_modules": "q_proj"}, "target_modules='q_proj', which leaves out"),
        ({"target_modules": r".*\.q_proj"}, "which leaves out .*down_proj"),
        ({"target_modules": "("}, r"target_modules with the pattern '\('"),
        ({"exclude_modules": ".*v_proj"}, r"exclude_modules='\.\*v_proj', which leaves out .*v_proj"),
        ({"layers_pattern": "layers"}, "layers_pattern='layers', but no layers_to_transform"),
        ({"alpha_pattern": None}, "alpha_pattern=None"),
        ({"bias": None}, "bias=None"),
    ],
)
def test_what_peft_would_not_load_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = saved(tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for read in (LoraAdapter.read, convert):
        with pytest.raises(UserError, match=message):
            read(folder)


@pytest.mark.parametrize(
    "config",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}, {"velora_config": {}}],
)
def test_what_peft_computes_otherwise_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = saved(tmp_path / "a", **config)
    for read in (LoraAdapter.read, convert):
        with pytest.raises(UserError, match=f"adapter_config.json has {next(iter(config))}="):
            read(folder)
