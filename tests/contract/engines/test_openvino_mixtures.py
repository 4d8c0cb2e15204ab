"""FP8 mixtures on the CPU engine: ModelOpt's numbers in TensorRT-LLM's layout, computed as its plugin computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.verify import verify
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import KvFormat, QFormat
from tests.contract.engines.conftest import CALIBRATION, Workshop, quiz_prompts, relative_error, same_top, torch_logits
from tests.support.specs import quant_spec

torch = pytest.importorskip("torch")

KINDS = ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.thorough)]


def rounded(x: Any, scale: float) -> Any:
    """Round to multiples of the scale that are E4M3 values."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def with_weights_of(model: Any, folder: Path) -> Any:
    """Give Transformers' model the weights of an FP8 checkpoint, and round what goes into each product."""
    opened = Checkpoint.open(folder)

    def linear(module: str) -> tuple[Any, float]:
        weight, scale, inputs = (
            torch.from_numpy(opened.tensor(f"{module}.{leaf}").astype(np.float32))
            for leaf in ("weight", "weights_scaling_factor", "activation_scaling_factor")
        )
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1)), float(inputs)

    for number, layer in enumerate(model.model.layers):
        place, attention = f"transformer.layers.{number}", layer.self_attn
        qkv, scale = linear(f"{place}.attention.qkv")
        dense, dense_scale = linear(f"{place}.attention.dense")
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = (*qkv.split([len(part.weight) for part in parts]), dense)
        scales = (scale, scale, scale, dense_scale)
        for part, weight, inputs in zip((*parts, attention.o_proj), weights, scales, strict=True):
            part.weight.data = weight
            part.register_forward_pre_hook(lambda _, x, inputs=inputs: (rounded(x[0], inputs),))
        layer.mlp.experts.forward = experts_of(linear(f"{place}.mlp.fc"), linear(f"{place}.mlp.proj"))
    return model


def experts_of(fc: tuple[Any, float], proj: tuple[Any, float]) -> Any:
    """Return what takes the place of Transformers' experts: up before gate, one scale for what goes into all."""

    def forward(x: Any, chosen: Any, weights: Any) -> Any:
        x = rounded(x, fc[1])
        mixed = torch.zeros_like(x)
        for expert in range(len(fc[0])):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            up, gate = (x[token] @ fc[0][expert].T).chunk(2, -1)
            inner = rounded(torch.nn.functional.silu(gate) * up, proj[1])
            mixed.index_add_(0, token, inner @ proj[0][expert].T * weights[token, slot, None])
        return mixed

    return forward


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_experts_compute_what_the_checkpoint_says(kind: str, workshop: Workshop) -> None:
    """1e-2 relative error of logits (measured: 4.0e-3 and 2.6e-3); rounding itself moves them by a tenth."""
    folder, plain = (
        workshop.checkpoint(kind, QFormat.FP8),
        torch_logits(workshop.plain(kind, torch.float32), workshop.batch(kind)),
    )
    assert verify(folder) == []
    found = workshop.logits(folder, kind)
    expected = torch_logits(with_weights_of(workshop.plain(kind, torch.float32), folder), workshop.batch(kind))
    assert relative_error(found, expected) <= 1e-2
    assert same_top(found, expected) >= 0.99
    assert 2e-2 < relative_error(found, plain) < 0.2
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.safetensors"]


def test_experts_in_fp8_are_the_models_own(workshop: Workshop) -> None:
    """Each weight is within an FP8 step of the model's: no expert is swapped, up is before gate."""
    fp8, plain = (Checkpoint.open(workshop.checkpoint("mixtral", each)) for each in (QFormat.FP8, QFormat.NONE))
    for module in ("mlp.fc", "mlp.proj"):
        name = f"transformer.layers.1.{module}"
        scale = fp8.tensor(f"{name}.weights_scaling_factor")
        assert scale.shape == (4, 1)
        weight, own = (each.tensor(f"{name}.weight").astype(np.float32) for each in (fp8, plain))
        # two roundings where gate and up had scales of their own
        assert np.abs(weight * scale[:, :, None] - own).max() <= 2 * np.abs(own).max() / 16
        assert fp8.tensor(f"{name}.activation_scaling_factor").shape == (1,)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fp8_experts_on_several_ranks_compute_the_same(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    """Scales go with their experts; those of what goes into a product are on every rank."""
    spec, given, parted = quant_spec(QFormat.FP8, KvFormat.FP8), tmp_path / "given", tmp_path / "parted"
    quantize(workshop.source(kind), given, spec, quiz_prompts()[:8], CALIBRATION, layout="hugging_face")
    quantize(given, tmp_path / "whole", spec, (), CALIBRATION)
    quantize(given, parted, spec, (), CALIBRATION, tp_size=2, pp_size=2, moe_ep_size=2)
    assert verify(parted) == []
    whole, ranks = Checkpoint.open(tmp_path / "whole"), Checkpoint.open(parted).rank_headers()
    layers = whole.config.num_hidden_layers
    for module in ("mlp.fc", "mlp.proj"):
        last, local = f"transformer.layers.{layers - 1}.{module}", f"transformer.layers.{layers // 2 - 1}.{module}"
        for leaf in ("weight", "weights_scaling_factor", "activation_scaling_factor"):
            own = whole.tensor(f"{last}.{leaf}")
            halves = [own, own] if leaf.startswith("activation") else np.split(own, 2)
            for file, half in zip(ranks[2:], halves, strict=True):
                np.testing.assert_array_equal(file[f"{local}.{leaf}"], half)
    np.testing.assert_array_equal(workshop.logits(parted, kind), workshop.logits(tmp_path / "whole", kind))


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
def test_an_expert_has_two_products(kind: str, workshop: Workshop) -> None:
    """Up and gate are one: every node of an expert costs time in each token, with rows or without."""
    engine = workshop.engine(workshop.float32_checkpoint(kind)) / "openvino_model.xml"
    nodes = [node for node in ov.Core().read_model(engine).get_ops() if ".experts." in node.get_friendly_name()]
    products = [node.get_friendly_name() for node in nodes if node.get_type_name() == "MatMul"]
    names = ("up_gate_proj", "down_proj")
    assert sorted(products) == sorted(
        f"model.layers.{layer}.mlp.experts.{number}.{name}" for layer in (0, 1) for number in range(4) for name in names
    )
    assert sum(node.get_type_name() == "Swish" for node in ov.Core().read_model(engine).get_ops()) == 2  # of all rows
