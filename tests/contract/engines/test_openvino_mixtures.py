"""FP8 mixtures on the CPU engine: ModelOpt's numbers in TensorRT-LLM's layout, computed as its plugin computes them."""

import platform
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.verify import verify
from pipelines.compress.quantizing import quantize
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.port import SamplingParams
from tests.contract.engines.conftest import (
    CALIBRATION,
    LIMITS,
    Workshop,
    quiz_prompts,
    relative_error,
    same_top,
    torch_logits,
)
from tests.support.made_once import made_once
from tests.support.specs import quant_spec

torch = pytest.importorskip("torch")

QUIET = SilentProgress()
KINDS = ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.thorough)]


def rounded(x: Any, scale: float) -> Any:
    """Round to multiples of the scale that are E4M3 values."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def with_weights_of(model: Any, folder: Path) -> Any:
    """Give Transformers' model the weights of an FP8 checkpoint, and round what goes into each product."""
    opened = Checkpoint(folder)

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


def logits_and_lead(model: Any, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, and by how much the last chosen expert was ahead of the next, least of all layers [8, 128]."""
    leads, chosen = [], model.config.num_experts_per_tok

    def record(_module: Any, _inputs: Any, routed: Any) -> None:
        best = routed[0].topk(chosen + 1, -1).values
        leads.append((best[:, -2] - best[:, -1]).reshape(batch.shape))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(record)
    return torch_logits(model, batch), torch.stack(leads).amin(0).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_experts_compute_what_the_checkpoint_says(kind: str, workshop: Workshop) -> None:
    """1e-2 relative error of logits (measured: 4.0e-3 and 2.6e-3); rounding itself moves them by a tenth.

    Sums in float32 depend on the processor. One that ends on the other side of an FP8 step moves a router's logits by
    up to 1e-3, and where two experts are closer than that, another is chosen: such tokens, 6 of 1,024, are left out.
    """
    folder, plain = (
        workshop.checkpoint(kind, QFormat.FP8),
        torch_logits(workshop.plain(kind, torch.float32), workshop.batch(kind)),
    )
    assert verify(folder) == []
    found = workshop.logits(folder, kind)
    model = with_weights_of(workshop.plain(kind, torch.float32), folder)
    expected, lead = logits_and_lead(model, workshop.batch(kind))
    certain = lead > 1e-3
    assert certain.mean() > 0.99
    assert relative_error(found[certain], expected[certain]) <= 1e-2
    assert same_top(found, expected) >= 0.99
    assert 2e-2 < relative_error(found, plain) < 0.2
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.safetensors"]


def test_experts_in_fp8_are_the_models_own(workshop: Workshop) -> None:
    """Each weight is within an FP8 step of the model's: no expert is swapped, up is before gate."""
    fp8, plain = (Checkpoint(workshop.checkpoint("mixtral", each)) for each in (QFormat.FP8, QFormat.NONE))
    assert fp8.config.quantization.excludes(
        "transformer.layers.1.mlp.router"
    )  # or TensorRT-LLM asks for its FP8 scales
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
    whole, ranks = Checkpoint(tmp_path / "whole"), Checkpoint(parted).ranks
    layers = whole.config.num_hidden_layers
    for module in ("mlp.fc", "mlp.proj"):
        last, local = f"transformer.layers.{layers - 1}.{module}", f"transformer.layers.{layers // 2 - 1}.{module}"
        for leaf in ("weight", "weights_scaling_factor", "activation_scaling_factor"):
            own = whole.tensor(f"{last}.{leaf}")
            halves = [own, own] if leaf.startswith("activation") else np.split(own, 2)
            for file, half in zip(ranks[2:], halves, strict=True):
                np.testing.assert_array_equal(file[f"{local}.{leaf}"], half)
    np.testing.assert_array_equal(workshop.logits(parted, kind), workshop.logits(tmp_path / "whole", kind))


def grouped(checkpoint: Path) -> Path:
    """Build an engine with one product for all experts; it computes the same on every processor."""
    out = checkpoint.with_name(f"grouped-{checkpoint.name}")
    return made_once(
        out, lambda out: OpenVinoEngine(OpenVinoOptions(experts="grouped")).build(checkpoint, LIMITS, out, QUIET)
    )


@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        ("qwen3_moe", QFormat.NONE),
        ("mixtral", QFormat.INT4_RTN),
        ("gpt_oss", QFormat.INT8_WO),
        *(
            pytest.param(kind, qformat, marks=pytest.mark.thorough)
            for kind in ("gpt_oss", "mixtral", "qwen3_moe")
            for qformat in (QFormat.NONE, QFormat.INT8_WO, QFormat.INT4_WO, QFormat.INT4_RTN)
        ),
    ],
)
def test_one_product_for_all_experts_computes_what_theirs_do(kind: str, qformat: QFormat, workshop: Workshop) -> None:
    """In every format that mixtures have, to the last digits of float32."""
    checkpoint = workshop.checkpoint(kind, qformat)
    engine = grouped(checkpoint)
    assert EngineFolder.load(engine).grouped_experts
    assert relative_error(workshop.logits(checkpoint, kind, engine=engine), workshop.logits(checkpoint, kind)) < 1e-5


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OpenVINO groups experts on x86-64 alone")
@pytest.mark.parametrize(("kind", "products"), [("mixtral", 3), ("gpt_oss", 2)])
def test_openvino_recognizes_experts_that_are_grouped(kind: str, products: int, workshop: Workshop) -> None:
    """Otherwise it would multiply every token by all of them."""
    engine = grouped(workshop.checkpoint(kind, QFormat.INT8_WO))
    compiled = ov.Core().compile_model(engine / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": 1})
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    assert kinds.count("GatherMatmul") == 2 * products  # in each of two layers


def test_experts_that_round_activations_are_not_grouped(workshop: Workshop) -> None:
    assert not EngineFolder.load(grouped(workshop.checkpoint("mixtral", QFormat.FP8))).grouped_experts


def test_an_engine_with_grouped_experts_is_for_processors_with_amx(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.engines.openvino.memory.has_amx", lambda: False)
    engine = grouped(workshop.checkpoint("mixtral", QFormat.INT8_WO))
    with OpenVinoEngine().open(engine) as session, pytest.raises(UserError, match=r"needs a processor with AMX and"):
        session.generate([[5, 6]], SamplingParams(1), QUIET)


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
