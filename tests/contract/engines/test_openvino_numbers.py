"""The CPU engine computes what its checkpoint says: compared with Transformers and with ModelOpt's simulation."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.verify import verify
from pipelines.domain.formats import BY_QUANT_ALGO, KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.memory import rounds_activations
from pipelines.engines.openvino.runtime import USUAL_GROUP, EngineFolder, OpenVinoOptions
from pipelines.engines.port import SamplingParams
from pipelines.host.machine import native_bf16
from tests.contract.engines.conftest import Workshop, as_exported, likeliest, relative_error, same_top, torch_logits
from tests.support.specs import mix_spec

torch = pytest.importorskip("torch")
ov = pytest.importorskip("openvino")
from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip

KINDS = ("gemma", "llama")
ONE_OFTEN = [pytest.param("gemma", marks=pytest.mark.thorough), "llama"]
FLIPPED = 0.015
"""Share of next tokens that may differ: one flipped code decides between two nearly equal logits, and which codes flip
depends on the processor's own rounding (int8_sq of gemma: 1.0 % on an Intel Xeon with VNNI, 1.1 % on an AMD EPYC)."""
SIMULATED = (QFormat.FP8, QFormat.INT8_SQ, QFormat.INT4_AWQ, QFormat.INT4_GPTQ, QFormat.W4A8_AWQ)
ONCE_EACH = (("gemma", QFormat.FP8), ("llama", QFormat.INT8_SQ), ("llama", QFormat.W4A8_AWQ))
"""A family and a format with each kind of activations and of tuning."""
FEW = {QFormat.FP8, QFormat.INT8_SQ}
"""Formats of the kinds of activations that are asked beside other settings too."""
HF_NAMES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


def test_openvino_agrees_that_this_processor_has_bf16() -> None:
    """The plan asks without OpenVINO, and the engine runs as was planned."""
    assert native_bf16() == ("BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_activations_are_rounded_where_we_say_so(precision: str, workshop: Workshop) -> None:
    """The plugin is asked to round here whatever we know of this processor."""
    chosen = OpenVinoOptions(inference_precision=precision)
    found = []
    for group in (0, USUAL_GROUP):
        how = {"INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group)}
        model = EngineFolder.load(workshop.engine(workshop.checkpoint("llama", QFormat.INT4_WO))).read_model()
        request = ov.Core().compile_model(model, "CPU", {**how, "INFERENCE_NUM_THREADS": 1}).create_infer_request()
        tokens = np.array(workshop.tokens("llama")[0][:32])[None]
        request.infer({
            "input_ids": tokens, "attention_mask": np.ones_like(tokens), "beam_idx": np.zeros(1, dtype=np.int32),
            "position_ids": np.arange(tokens.shape[1])[None],
        })  # fmt: skip
        found.append(request.get_tensor("logits").data.copy())
    assert (not np.array_equal(*found)) == rounds_activations(chosen)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_engine_is_transformers(kind: str, workshop: Workshop) -> None:
    """A relative error of 1e-4 at most; 1e-6 was measured."""
    model = as_exported(workshop.plain(kind, torch.float32), kind)
    found = workshop.logits(workshop.float32_checkpoint(kind), kind)
    assert relative_error(found, torch_logits(model, workshop.batch(kind))) <= 1e-4


@pytest.mark.parametrize("kind", [pytest.param("gemma", marks=pytest.mark.thorough), "llama"])
def test_bf16_engine_is_transformers(kind: str, workshop: Workshop) -> None:
    """With bf16 arithmetic on both sides the roundings fall differently; 1e-2 at most."""
    checkpoint = workshop.checkpoint(kind, QFormat.NONE)
    found = workshop.logits(checkpoint, kind, inference_precision="bf16")
    assert relative_error(found, torch_logits(workshop.plain(kind), workshop.batch(kind))) <= 1e-2


@pytest.mark.parametrize("kind", ONE_OFTEN)
def test_one_thread_is_enough(kind: str, workshop: Workshop) -> None:
    """OpenVINO divided by zero there on processors with AMX (its issue 28550)."""
    found = workshop.logits(workshop.checkpoint(kind, QFormat.NONE), kind, inference_precision="auto", num_threads=1)
    assert relative_error(found, torch_logits(workshop.plain(kind), workshop.batch(kind))) <= 1e-2


@pytest.mark.parametrize("kind", ONE_OFTEN)
def test_greedy_text_is_transformers(kind: str, workshop: Workshop) -> None:
    """64 greedy tokens of 10 prompts are the same, through paged attention and in-flight batching."""
    model = as_exported(workshop.plain(kind, torch.float32), kind)
    prompts = workshop.tokens(kind)[:10]
    with workshop.open(workshop.float32_checkpoint(kind)) as session:
        found = session.generate(prompts, SamplingParams(64), SilentProgress())
    for prompt, generation in zip(prompts, found, strict=True):
        assert len(generation.token_ids) == 64
        assert generation.token_ids == likeliest(model, prompt, generation.token_ids)
        assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "qformat"),
    [
        *ONCE_EACH,
        *(
            pytest.param(kind, qformat, marks=pytest.mark.thorough)
            for kind in KINDS
            for qformat in SIMULATED
            if (kind, qformat) not in ONCE_EACH
        ),
    ],
)
def test_quantized_engine_is_the_simulation(kind: str, qformat: QFormat, workshop: Workshop) -> None:
    """2e-2 relative error, equal next tokens but for flipped codes: f32 arithmetic on both sides, the same scales.

    That every format's engine is its checkpoint, and the checkpoint the simulation, is tested for itself.
    """
    found = workshop.logits(workshop.checkpoint(kind, qformat), kind)
    expected = workshop.simulated_logits(kind, qformat)
    assert relative_error(found, expected) <= 2e-2
    assert same_top(found, expected) >= 1 - FLIPPED


MIXES = ((QFormat.FP8, QFormat.INT4_AWQ), (QFormat.INT8_SQ, QFormat.W4A8_AWQ))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "candidates"), [("gemma", MIXES[0]), ("llama", MIXES[1])])
def test_a_mix_of_formats_is_the_simulation(kind: str, candidates: tuple[QFormat, ...], workshop: Workshop) -> None:
    """The bounds of one format hold for linears of two formats and of 16 bit, searched within 8 bits per weight."""
    spec = mix_spec(candidates, 8.0, texts=4)
    folder = workshop.mix(kind, spec)
    assert verify(folder) == []
    assert set(CheckpointConfig.load(folder).qformats) <= {*candidates, QFormat.NONE}
    found = workshop.logits(folder, kind)
    expected = torch_logits(workshop.simulated_by(kind, spec), workshop.batch(kind))
    assert relative_error(found, expected) <= 2e-2
    assert same_top(found, expected) >= 1 - FLIPPED


@pytest.mark.thorough
def test_a_mix_is_its_checkpoint(workshop: Workshop) -> None:
    """Decoded weights in torch, each input rounded as its own linear's format does."""
    folder = workshop.mix("llama", mix_spec(MIXES[0], 6.0, texts=4))
    assert CheckpointConfig.load(folder).qformats == MIXES[0]
    model = decoded(workshop.plain("llama").float(), Checkpoint(folder))
    found, expected = workshop.logits(folder, "llama"), torch_logits(model, workshop.batch("llama"))
    assert relative_error(found, expected) <= 1e-2
    assert same_top(found, expected) >= 0.99


@pytest.mark.parametrize(
    "qformat",
    [pytest.param(each, marks=[] if each in FEW else [pytest.mark.thorough]) for each in SIMULATED],
)
def test_bf16_arithmetic_stays_near_the_simulation(qformat: QFormat, workshop: Workshop) -> None:
    """5e-2 and 97 %: bf16 rounds once more before every quantization."""
    found = workshop.logits(workshop.checkpoint("llama", qformat), "llama", inference_precision="bf16")
    expected = workshop.simulated_logits("llama", qformat)
    assert relative_error(found, expected) <= 5e-2
    assert same_top(found, expected) >= 0.97


@pytest.mark.parametrize(("kind", "qformat", "bits"), [("gemma", QFormat.INT8_WO, 8), ("llama", QFormat.INT4_WO, 4)])
def test_weight_only_engine_is_the_builders_arithmetic(
    kind: str, qformat: QFormat, bits: int, workshop: Workshop
) -> None:
    """Per output channel: scale amax / 2^(bits-1), round half away from zero, clip, scale kept in bf16."""
    model = as_exported(workshop.plain(kind).float(), kind)
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and "lm_head" not in name:
            weight, bound = linear.weight.data, 2 ** (bits - 1)
            scale = weight.abs().amax(1, keepdim=True) / bound
            codes = (weight / scale).abs().add(0.5).floor() * weight.sign()
            linear.weight.data = codes.clamp(-bound, bound - 1) * scale.bfloat16().float()
    found = workshop.logits(workshop.checkpoint(kind, qformat), kind)
    assert relative_error(found, torch_logits(model, workshop.batch(kind))) <= 1e-3


@pytest.mark.parametrize("qformat", [*SIMULATED, QFormat.NVFP4])
def test_the_engine_is_its_checkpoint(qformat: QFormat, workshop: Workshop) -> None:
    """Decoded weights in torch, inputs rounded in torch: what remains are flipped codes of single values.

    An FP4 code is a step of up to a third of its value, so for NVFP4 they weigh more: 0.54 % on an Intel Xeon, 1.1 % on
    an AMD EPYC. For NVFP4, which ModelOpt simulates on CUDA only, this repeats the arithmetic of its kernel.
    """
    folder = workshop.checkpoint("llama", qformat)
    model = decoded(workshop.plain("llama").float(), Checkpoint(folder))
    found = workshop.logits(folder, "llama")
    expected = torch_logits(model, workshop.batch("llama"))
    assert relative_error(found, expected) <= (1.5e-2 if qformat is QFormat.NVFP4 else 1e-2)
    assert same_top(found, expected) >= 0.99


def test_nvfp4_with_bf16_arithmetic_is_as_far_as_torch(workshop: Workshop) -> None:
    """A bf16 rounding often is another FP4 code: torch itself moves by 9 %, the engine by no more than 1.2 x that."""
    folder = workshop.checkpoint("llama", QFormat.NVFP4)
    model = decoded(workshop.plain("llama").float(), Checkpoint(folder))
    exact = torch_logits(model, workshop.batch("llama"))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or "norm" in name:
            module.register_forward_hook(lambda _module, _args, output: output.bfloat16().float())
    torch_moved = relative_error(torch_logits(model, workshop.batch("llama")), exact)
    moved = relative_error(workshop.logits(folder, "llama", inference_precision="bf16"), exact)
    assert moved <= 1.2 * torch_moved


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_zero_points_are_in_the_numbers(shift: float, workshop: Workshop, tmp_path: Path) -> None:
    """Integers 7 to 9, as libraries store them, and in between; what the arithmetic gives in Transformers."""
    source = workshop.checkpoint("llama", QFormat.INT4_RTN)
    config = json.loads((source / "config.json").read_text())
    config["quantization"]["has_zero_point"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "rank0.safetensors")
    torch.manual_seed(5)
    for name in [name for name in tensors if name.endswith(".weights_scaling_factor")]:
        scale = tensors[name].T
        points = torch.randint(7, 10, scale.shape) + shift
        tensors[name.replace("weights_scaling_factor", "zero")] = ((8 - points) * scale).bfloat16().contiguous()
    save_file(tensors, tmp_path / "rank0.safetensors")
    assert verify(tmp_path) == []
    expected = torch_logits(decoded(workshop.plain("llama").float(), Checkpoint(tmp_path)), workshop.batch("llama"))
    assert relative_error(workshop.logits(tmp_path, "llama"), expected) <= 2e-2


@pytest.mark.parametrize("kv", [KvFormat.FP8, KvFormat.INT8])
def test_an_8_bit_kv_cache_is_in_the_numbers(kv: KvFormat, workshop: Workshop) -> None:
    """K and V are rounded to the cache's values: close to the 16-bit cache, but not the same."""
    plain = workshop.logits(workshop.checkpoint("llama", QFormat.NONE), "llama")
    rounded = workshop.logits(workshop.checkpoint("llama", QFormat.NONE, kv), "llama")
    assert 1e-4 < relative_error(rounded, plain) < 5e-2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "tp", "pp", "qformat"),
    [
        ("llama", 2, 1, QFormat.INT4_AWQ),
        ("llama", 1, 2, QFormat.FP8),
        ("gemma", 2, 1, QFormat.NONE),
        ("gemma", 2, 1, QFormat.FP8),
    ],
)
def test_split_checkpoints_give_the_same_engine(
    kind: str, tp: int, pp: int, qformat: QFormat, workshop: Workshop
) -> None:
    """Two ranks or two stages are merged to what one file holds; Gemma's one KV head is on both ranks."""
    whole = workshop.logits(workshop.checkpoint(kind, qformat), kind)
    split = workshop.logits(workshop.checkpoint(kind, qformat, tp=tp, pp=pp), kind)
    np.testing.assert_array_equal(split, whole)


def decoded(model: torch.nn.Module, checkpoint: Checkpoint) -> torch.nn.Module:
    """Put decoded weights into a float32 model and round the input of every linear of its layers."""
    for layer, block in enumerate(model.model.layers):
        for module, names in HF_NAMES.items():
            name = f"transformer.layers.{layer}.{module}"
            weight = torch.from_numpy(dequantize(checkpoint, name))
            round_input = input_rounding(checkpoint, name)
            for linear in (block.get_submodule(part) for part in names):
                linear.weight.data, weight = weight[: linear.out_features], weight[linear.out_features :]
                linear.register_forward_pre_hook(lambda _, args, rounded=round_input: (rounded(args[0]),))
    return model


def input_rounding(checkpoint: Checkpoint, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a format does to an activation, from its definition."""

    def tensor(leaf: str, default: float) -> torch.Tensor:
        values = checkpoint.tensor(f"{name}.{leaf}") if f"{name}.{leaf}" in checkpoint else np.float32(default)
        return torch.from_numpy(np.array(values, dtype=np.float32))

    prequant, scale = tensor("prequant_scaling_factor", 1), tensor("activation_scaling_factor", 1)
    rounding: dict[QFormat, Callable[[torch.Tensor], torch.Tensor]] = {
        QFormat.INT8_SQ: lambda x: (x / scale).round().clamp(-128, 127) * scale,
        QFormat.FP8: lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,
        QFormat.NVFP4: lambda x: nvfp4_round(x, float(scale)),
    }
    rounding[QFormat.W4A8_AWQ] = rounding[QFormat.FP8]
    qformat = BY_QUANT_ALGO[checkpoint.config.quantization_of(name).quant_algo]
    rounded = rounding.get(qformat, lambda x: x)
    return lambda x: rounded(x * prequant)


def nvfp4_round(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Blocks of 16 with an E4M3 scale; E2M1 by its seven bounds, ties to the even code."""
    blocks = x.reshape(-1, 16)
    block_scale = (blocks.abs().amax(1, keepdim=True) / (6 * scale)).clamp(max=448)
    block_scale = block_scale.to(torch.float8_e4m3fn).float() * scale
    block_scale = torch.where(block_scale >= 1e-5, block_scale, torch.ones_like(block_scale))
    magnitude = blocks.abs() / block_scale
    code = torch.searchsorted(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), magnitude)
    code += torch.isin(magnitude, torch.tensor([0.75, 1.75, 3.5])).long()
    rounded = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[code]
    return (rounded * block_scale * blocks.sign()).reshape(x.shape)
