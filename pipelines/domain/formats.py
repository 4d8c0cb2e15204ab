"""Quantization formats: one row holds everything known about a format, and all other code reads the row.

A format combines a kind of weights with a kind of activations. How a tensor is packed, read back and multiplied depends
only on these kinds, so a format made of existing kinds needs no code of its own.

Sources: TensorRT-LLM 1.2 `quantization/mode.py`, `builder.py`, `quantize_by_modelopt.py`, support matrix; ModelOpt
0.37/0.47 exports. What the CPU engine costs is measured: docs/decisions/0015-knowing-the-machine.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pipelines.domain.errors import Fault
from pipelines.domain.units import MIB


class QFormat(StrEnum):
    """Our names, the same as TensorRT-LLM's `quantize.py --qformat` where both exist."""

    NONE = "none"
    FP8 = "fp8"
    INT8_SQ = "int8_sq"
    INT4_AWQ = "int4_awq"
    INT4_GPTQ = "int4_gptq"
    INT4_RTN = "int4_rtn"
    W4A8_AWQ = "w4a8_awq"
    INT8_WO = "int8_wo"
    INT4_WO = "int4_wo"
    NVFP4 = "nvfp4"
    AUTO = "auto"
    """Each linear in the format that a search chose for it, of those that were its candidates."""


class KvFormat(StrEnum):
    """Element type of the KV cache; `auto` is the model's own 16-bit type."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


Activation = Literal["16bit", "fp8", "int8", "fp4"]
"""Input of the matrix product; "fp4" has a scale per 16 neighbours, the others one per tensor."""

Tuning = Literal["awq", "smoothquant"]
"""Methods that move scales between activations and weights: activations are first multiplied by a scale per channel."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """How the weight of a linear is stored.

    Attributes:
        bits: per weight as the kernel reads it, without scales.
        stored: element type in a TensorRT-LLM checkpoint, safetensors spelling; None is the model's own float type.
        integer: whether TensorRT-LLM's kernel for INT8 and INT4 weights runs it.
        group: usual number of input channels that share a scale; 0 is no groups.
        group_is_fixed: whether no other number is possible.
        scale_bits: per group.
        scale_type: element type of the scales in a TensorRT-LLM checkpoint.
        second_scale: shape of the scale of the tensor that the scales of groups are under; None without.
        pairs_outputs: whether two neighbouring output channels share a byte of the checkpoint.
        pairs_inputs: whether two neighbouring input channels do.
        scale_per_output: whether there is one scale per output channel; ModelOpt cannot copy such weights to several
            ranks.
    """

    name: str
    bits: int
    stored: str | None
    integer: bool = False
    group: int = 0
    group_is_fixed: bool = False
    scale_bits: int = 0
    scale_type: str = "F32"
    second_scale: tuple[int, ...] | None = None
    pairs_outputs: bool = False
    pairs_inputs: bool = False
    scale_per_output: bool = False

    @property
    def at_build(self) -> bool:
        """Whether the checkpoint holds float weights that the engine build quantizes."""
        return self.stored is None and self.bits < 16

    def group_size(self, requested: int) -> int:
        """Return how many input channels share a scale when `asked` is requested; 0 where there are no groups."""
        return requested if self.group and not self.group_is_fixed else self.group


FLOAT_WEIGHTS = WeightKind("16 bit", 16, None)
FP8_WEIGHTS = WeightKind("E4M3, one scale per tensor", 8, "F8_E4M3")
INT8_WEIGHTS = WeightKind("INT8, one scale per output channel", 8, "I8", integer=True, scale_per_output=True)
INT4_WEIGHTS = WeightKind(
    "INT4, one scale per group", 4, "I8", integer=True, group=128, scale_bits=16, pairs_outputs=True
)
INT4_AS_FP8_WEIGHTS = WeightKind(
    "INT4, one scale per group, widened to FP8 under a scale of the tensor",
    4, "I8", integer=True, group=128, scale_bits=16, second_scale=(1,), pairs_outputs=True,
)  # fmt: skip
FP4_WEIGHTS = WeightKind(
    "E2M1, an E4M3 scale per group under a scale of the tensor",
    4, "U8", group=16, group_is_fixed=True, scale_bits=8, scale_type="F8_E4M3", second_scale=(), pairs_inputs=True,
)  # fmt: skip
CHOSEN_WEIGHTS = WeightKind("chosen for each linear", 16, None)
INT8_AT_BUILD = WeightKind("INT8, quantized by the engine build", 8, None, integer=True)
INT4_AT_BUILD = WeightKind("INT4, quantized by the engine build", 4, None, integer=True)


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Kernels that the CPU engine compiles for every number of tokens in an iteration.

    Attributes:
        linears: whether each shape of linears has one, beside the one that always exists.
        size: bytes of each kernel, everything included; it does not depend on the model's size.
    """

    linears: bool
    size: float


@dataclass(frozen=True, slots=True)
class CpuCost:
    """Memory that a format costs the CPU engine, in bytes (measured).

    Attributes:
        linear: per weight of a linear, widened and packed copies together.
        mapped: per weight of a linear that stays mapped from the engine file.
        layer: per decoder layer, for the graph itself.
        token: per token of an iteration and channel of (MLP, hidden state, queries, keys).
        f32_linear: `linear` when the arithmetic is float32.
        f32_factor: multiplies `token` when the arithmetic is float32.
        kernels: compiled for every number of tokens.
        f32_kernels: `kernels` when the arithmetic is float32.
        avx2_copies: packed copies of a linear in float32 without AVX-512.
        kernels_without_bf16: `f32_kernels` on a processor without native bf16, where they are others.
    """

    linear: float
    mapped: float
    layer: float
    token: tuple[float, float, float, float]
    f32_linear: float
    f32_factor: float
    kernels: CpuKernels
    f32_kernels: CpuKernels
    avx2_copies: int = 1
    kernels_without_bf16: CpuKernels | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpec:
    """Everything known about one quantization format.

    Attributes:
        quant_algo: `quantization.quant_algo` in a TensorRT-LLM checkpoint; None is 16 bit.
        activation: input of the matrix product.
        tuning: method that moves scales between activations and weights, or None.
        preset: ModelOpt's configuration, an attribute of `modelopt.torch.quantization`; None exports floats.
        modelopt_on_cpu: oldest ModelOpt that makes it without a GPU, (major, minor); of the two versions that the
            project is tested with.
        searches_scales: whether the scale of a group of weights may be that with the least squared error.
        sequential: whether a layer is calibrated on the outputs of the quantized layers before it; the others see those
            of the original layers.
        llm_api: whether TensorRT-LLM's PyTorch backend runs it.
        llm_api_below: it is listed for compute capabilities below this one.
        edge: whether TensorRT Edge-LLM's exporter reads the whole checkpoint.
        mixable: whether TensorRT-LLM's `quantize.py --autoq_format` takes it, for some linears of a model.
        products_of_tensorrt: whether TensorRT itself multiplies the linears when gemm_plugin is off. In other formats
            plugins do (TensorRT-LLM's `builder.py`, `quantization/functional.py`), which have no 2:4 kernels.
        fp8_kv_cache: published engines of this format hold the KV cache in FP8 unless they say otherwise.
        aliases: other names in published measurements.
        heading: of a narrow table's column, in two lines.
        cpu: cost for the CPU engine; None means not measured, and then its memory is not predicted.
    """

    summary: str
    quant_algo: str | None
    weights: WeightKind
    activation: Activation = "16bit"
    tuning: Tuning | None = None
    preset: str | None = None
    modelopt_on_cpu: tuple[int, int] = (0, 37)
    searches_scales: bool = False
    sequential: bool = False
    llm_api: bool = False
    llm_api_below: float | None = None
    edge: bool = False
    mixable: bool = False
    products_of_tensorrt: bool = False
    fp8_kv_cache: bool = False
    aliases: tuple[str, ...] = ()
    heading: tuple[str, str]
    cpu: CpuCost | None = None

    @property
    def calibrated(self) -> bool:
        """Whether ModelOpt simulates the format."""
        return self.preset is not None

    @property
    def reads_texts(self) -> bool:
        """Whether weights or scales depend on calibration texts; else weights are rounded by what they are alone."""
        return self.calibrated and (self.sequential or not self.plain_activations)

    @property
    def plain_activations(self) -> bool:
        """Whether products see the activation as it is, neither rounded nor multiplied by a scale."""
        return self.activation == "16bit" and self.tuning is None

    @property
    def weight_only(self) -> bool:
        """Whether weights are quantized and activations are not."""
        return self.activation == "16bit" and self.weights.bits < 16

    @property
    def rounds_alone(self) -> bool:
        """Whether weights are rounded by what they are alone, whatever text is calibrated on."""
        return self.weights.bits < 16 and self.tuning is None and not self.sequential

    @property
    def linear_bits(self) -> float:
        """Bits per weight of a linear, including the scales of groups of the usual size."""
        return self.bits_in_groups(self.weights.group)

    def bits_in_groups(self, group_size: int) -> float:
        """Return the bits per weight of a linear when groups of `asked` input channels are requested."""
        group = self.weights.group_size(group_size)
        return self.weights.bits + (self.weights.scale_bits / group if group else 0.0)


_PACKED, _PACKED_F32 = CpuKernels(linears=True, size=0.22 * MIB), CpuKernels(linears=True, size=0.165 * MIB)
"""Those of the formats that quantize weights only, in bf16 and float32."""
_GROUPED_INT4 = CpuCost(
    *(0.55, 0.53, 1.35 * MIB, (9.0, 4.2, 9.4, 0.0), 1.05, 2.45),
    kernels=_PACKED,
    f32_kernels=_PACKED_F32,
)

FORMATS: dict[QFormat, FormatSpec] = {
    QFormat.NONE: FormatSpec(
        summary="16-bit weights and activations",
        quant_algo=None,
        weights=FLOAT_WEIGHTS,
        products_of_tensorrt=True,
        llm_api=True,
        edge=True,
        aliases=("fp16", "bf16"),
        heading=("16", "bit"),
        cpu=CpuCost(
            *(2.0, 2.0, 1.06 * MIB, (7.05, 10.4, 8.6, 2.3), 4.0, 2.1),
            kernels=CpuKernels(linears=True, size=0.21 * MIB),
            f32_kernels=CpuKernels(linears=False, size=0.25 * MIB),
            kernels_without_bf16=CpuKernels(linears=True, size=0.15 * MIB),
        ),
    ),
    QFormat.FP8: FormatSpec(
        summary="FP8 (E4M3) weights and activations, per tensor",
        quant_algo="FP8",
        weights=FP8_WEIGHTS,
        activation="fp8",
        preset="FP8_DEFAULT_CFG",
        mixable=True,
        products_of_tensorrt=True,
        llm_api=True,
        edge=True,
        fp8_kv_cache=True,
        heading=("fp8", ""),
        cpu=CpuCost(
            *(4.08, 1.0, 1.77 * MIB, (27.3, 1.5, 0.0, 55.4), 9.1, 1.4),
            kernels=CpuKernels(linears=True, size=0.19 * MIB),
            f32_kernels=CpuKernels(linears=False, size=0.25 * MIB),
        ),
    ),
    QFormat.INT8_SQ: FormatSpec(
        summary="INT8 weights and activations with SmoothQuant",
        quant_algo="W8A8_SQ_PER_CHANNEL",
        weights=INT8_WEIGHTS,
        activation="int8",
        tuning="smoothquant",
        preset="INT8_SMOOTHQUANT_CFG",
        mixable=True,
        aliases=("int8",),
        edge=True,
        heading=("int8", "sq"),
        cpu=CpuCost(
            *(1.02, 1.0, 1.53 * MIB, (12.5, 5.0, 9.0, 0.0), 1.03, 1.75),
            kernels=CpuKernels(linears=True, size=0.20 * MIB),
            f32_kernels=CpuKernels(linears=True, size=0.17 * MIB),
            avx2_copies=2,
        ),
    ),
    QFormat.INT4_AWQ: FormatSpec(
        summary="INT4 weights in groups, AWQ",
        quant_algo="W4A16_AWQ",
        weights=INT4_WEIGHTS,
        tuning="awq",
        preset="INT4_AWQ_CFG",
        mixable=True,
        llm_api=True,
        edge=True,
        llm_api_below=12.0,
        aliases=("int4", "w4a16"),
        heading=("int4", "awq"),
        cpu=_GROUPED_INT4,
    ),
    QFormat.INT4_GPTQ: FormatSpec(
        summary="INT4 weights in groups, GPTQ",
        quant_algo="W4A16_AWQ",  # its layout without smoothing; that of W4A16_GPTQ depends on the GPU
        weights=INT4_WEIGHTS,
        searches_scales=True,
        preset="INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
        sequential=True,
        llm_api=True,
        llm_api_below=12.0,
        edge=True,
        heading=("int4", "gptq"),
        cpu=_GROUPED_INT4,
    ),
    QFormat.INT4_RTN: FormatSpec(
        summary="INT4 weights in groups, rounded to nearest",
        quant_algo="W4A16_AWQ",
        weights=INT4_WEIGHTS,
        searches_scales=True,
        preset="INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
        llm_api=True,
        llm_api_below=12.0,
        edge=True,
        heading=("int4", "rtn"),
        cpu=_GROUPED_INT4,
    ),
    QFormat.W4A8_AWQ: FormatSpec(
        summary="INT4 weights in groups with AWQ, FP8 activations",
        quant_algo="W4A8_AWQ",
        weights=INT4_AS_FP8_WEIGHTS,
        activation="fp8",
        tuning="awq",
        preset="W4A8_AWQ_BETA_CFG",
        mixable=True,
        llm_api=True,
        llm_api_below=12.0,
        heading=("w4a8", "awq"),
    ),
    QFormat.INT8_WO: FormatSpec(
        summary="INT8 weights, one scale per output channel",
        quant_algo="W8A16",
        weights=INT8_AT_BUILD,
        heading=("int8", "wo"),
        cpu=CpuCost(
            *(1.02, 1.0, 1.06 * MIB, (7.05, 10.4, 8.6, 2.3), 1.03, 1.97),
            kernels=_PACKED,
            f32_kernels=_PACKED_F32,
            avx2_copies=2,
        ),
    ),
    QFormat.INT4_WO: FormatSpec(
        summary="INT4 weights, one scale per output channel",
        quant_algo="W4A16",
        weights=INT4_AT_BUILD,
        heading=("int4", "wo"),
        cpu=CpuCost(
            *(0.51, 0.5, 1.06 * MIB, (7.05, 10.4, 8.6, 2.3), 0.52, 1.97),
            kernels=_PACKED,
            f32_kernels=_PACKED_F32,
            avx2_copies=2,
        ),
    ),
    QFormat.NVFP4: FormatSpec(
        summary="FP4 (E2M1) weights and activations, groups of 16",
        quant_algo="NVFP4",
        weights=FP4_WEIGHTS,
        activation="fp4",
        preset="NVFP4_DEFAULT_CFG",
        modelopt_on_cpu=(0, 47),
        llm_api=True,
        edge=True,
        fp8_kv_cache=True,
        aliases=("fp4",),
        heading=("nv", "fp4"),
    ),
    QFormat.AUTO: FormatSpec(
        summary="a format for each linear, chosen by a search",
        quant_algo="MIXED_PRECISION",
        weights=CHOSEN_WEIGHTS,
        llm_api=True,
        edge=True,
        heading=("auto", ""),
    ),
}

UNIFORM: tuple[QFormat, ...] = tuple(qformat for qformat in QFormat if qformat is not QFormat.AUTO)
"""Formats that all linears of a model can share."""

BY_QUANT_ALGO: dict[str | None, QFormat] = {spec.quant_algo: name for name, spec in reversed(FORMATS.items())}
"""The same table, read from `quant_algo` alone; where formats share one, the first of them."""

UNSMOOTHED: dict[QFormat, QFormat] = {QFormat.INT4_AWQ: QFormat.INT4_GPTQ}
"""The same weights and `quant_algo`, but `pre_quant_scale` is false: activations are not multiplied by scales first.

A checkpoint does not say by which algorithm its weights were found, so int4_rtn is read back under this name too.
"""

BY_ALIAS: dict[str, QFormat] = {word: name for name in UNIFORM for word in (*FORMATS[name].aliases, name.value)}
"""The same table, read from a published measurement's precision."""


def stored_as(quant_algo: str | None, pre_quant_scale: bool) -> QFormat:
    """Return the format that a checkpoint's `quantization` block describes.

    Raises:
        KeyError: no format has this `quant_algo`.
    """
    first = BY_QUANT_ALGO[quant_algo]
    return first if pre_quant_scale else UNSMOOTHED.get(first, first)


def mix_faults(candidates: Sequence[QFormat], effective_bits: float) -> Iterator[Fault]:
    """Yield why a search cannot choose among these formats, or not within so many bits per weight."""
    mixable = [qformat for qformat in UNIFORM if FORMATS[qformat].mixable]
    allowed = f"Candidates: {', '.join(mixable)}."
    for qformat in candidates:
        if qformat not in mixable:
            yield Fault(f"quant.candidates has {qformat}, which cannot be mixed.", allowed)
    if {QFormat.FP8, QFormat.INT8_SQ} <= set(candidates):
        yield Fault(
            "quant.candidates has fp8 and int8_sq, which TensorRT-LLM does not mix.",
            "One of the two, with int4_awq or w4a8_awq.",
        )
    if len(set(candidates)) < len(candidates) or not candidates:
        yield Fault(f"quant.candidates={','.join(candidates)}.", f"Each at most once, at least one. {allowed}")
    bits = [FORMATS[qformat].weights.bits for qformat in candidates]
    if bits and not min(bits) <= effective_bits < 16:
        yield Fault(
            f"quant.effective_bits={effective_bits:g} is out of reach of quant.candidates={','.join(candidates)}.",
            f"Reachable: {min(bits)}, all linears in {candidates[bits.index(min(bits))]}, up to less than 16.",
        )


SCALES_SINCE = (0, 47)
"""First of the two ModelOpt versions that the project is tested with whose scales need not come from a maximum."""


def version_faults(version: str, int4_scales: str, fp4_inputs: str) -> list[Fault]:
    """Return why this version of ModelOpt, e.g. "0.37.0", cannot choose scales like that on any device."""
    if tuple(int(part) for part in version.split(".")[:2]) >= SCALES_SINCE:
        return []
    ways = {"int4_scales": int4_scales, "fp4_inputs": fp4_inputs}
    return [
        Fault(
            f"quant.{name}={way} needs an algorithm that nvidia-modelopt {version} does not have.",
            f"{SCALES_SINCE[0]}.{SCALES_SINCE[1]}.0 or newer has it.",
            f"Install a newer nvidia-modelopt, or leave quant.{name}={way} out.",
        )
        for name, way in ways.items()
        if way != "max"
    ]


def scale_faults(qformat: QFormat, int4_scales: str, fp4_inputs: str) -> list[Fault]:
    """Return why the scales of a format cannot be chosen like that; "max" is how all formats have them."""
    why = {
        QFormat.INT4_AWQ: "; ModelOpt's export of AWQ takes scales from the largest weights again",
        QFormat.INT4_WO: "; trtllm-build itself computes its scales",
        QFormat.AUTO: "; the search compares formats with their usual scales",
    }.get(qformat, "")
    options = (
        ("int4_scales", int4_scales, [name for name in UNIFORM if FORMATS[name].searches_scales], why),
        ("fp4_inputs", fp4_inputs, [name for name in UNIFORM if FORMATS[name].activation == "fp4"], ""),
    )
    return [
        Fault(
            f"quant.{name}={way} has no effect on quant={qformat}{reason}.",
            f"It applies to quant={', '.join(works)}.",
            "Leave it out.",
        )
        for name, way, works, reason in options
        if way != "max" and qformat not in works
    ]


def tuning_faults(
    formats: Sequence[QFormat], smoothquant_alpha: float | None, awq_alpha_step: float | None
) -> list[Fault]:
    """Return which option of an algorithm is given though none of the formats is made by it."""
    options = {"smoothquant": ("smoothquant_alpha", smoothquant_alpha), "awq": ("awq_alpha_step", awq_alpha_step)}
    return [
        Fault(
            f"quant.{name}={value} has no effect on {' and '.join(formats)}.",
            f"It applies to {', '.join(each for each in UNIFORM if FORMATS[each].tuning == tuning)}.",
            "Leave it out.",
        )
        for tuning, (name, value) in options.items()
        if value is not None and all(FORMATS[each].tuning != tuning for each in formats)
    ]


def rounding_is_known(qformat: QFormat, int4_scales: str) -> bool:
    """Return whether training can compute with the weights that the format will round to."""
    return FORMATS[qformat].rounds_alone and int4_scales == "max"


def group_instead(qformat: QFormat, size: int, other: QFormat) -> int:
    """Return the group size when another format replaces the given one: the same, unless it was the format's own."""
    own = FORMATS[qformat].weights.group_is_fixed
    return (FORMATS[other].weights.group or size) if own else size


def lacks_fp8(qformat: QFormat, capability: float) -> bool:
    """Return whether a GPU of this compute capability lacks FP8 arithmetic for the format."""
    return FORMATS[qformat].activation == "fp8" and 8.0 <= capability < 8.9


def lacks_fp4(qformat: QFormat, capability: float) -> bool:
    """Return whether a GPU of this compute capability lacks FP4 arithmetic for the format."""
    return FORMATS[qformat].activation == "fp4" and 8.0 <= capability < 10.0


def lacks_integers(qformat: QFormat, capability: float) -> bool:
    """Return whether TensorRT-LLM's builder lacks INT8 and INT4 kernels for the format on this compute capability."""
    return FORMATS[qformat].weights.integer and 10.0 <= capability < 12.0


def lacks_fp8_kv(kv_format: KvFormat, capability: float) -> bool:
    """Return whether a GPU of this compute capability cannot convert a KV cache to FP8."""
    return kv_format is KvFormat.FP8 and 8.0 <= capability < 8.9


def lacks_int8_kv(kv_format: KvFormat, capability: float) -> bool:
    """Return whether TensorRT-LLM's builder refuses an INT8 KV cache on this compute capability."""
    return kv_format is KvFormat.INT8 and 10.0 <= capability < 12.0


def rules_out_reuse(kv_format: KvFormat, qformat: QFormat) -> bool:
    """Return whether a later prompt cannot read the blocks of such a KV cache.

    An INT8 cache rules that out always, FP8 unless attention over the prompt runs in FP8 (or FP4) as well.
    Source: tensorrt_llm/builder.py of TensorRT-LLM, which switches paged context attention off.
    """
    in_fp8 = kv_format is KvFormat.FP8 and FORMATS[qformat].activation in ("fp8", "fp4")
    return kv_format is not KvFormat.AUTO and not in_fp8


def formats_for(capability: float) -> list[QFormat]:
    """List the weight formats whose engines can be built for a compute capability of 8.0 or newer."""
    lacks = (lacks_fp8, lacks_fp4, lacks_integers)
    return [qformat for qformat in UNIFORM if not any(lack(qformat, capability) for lack in lacks)]


def proposed(formats: Sequence[QFormat]) -> list[QFormat]:
    """Leave out formats whose engines have the size and the speed of another: they differ in accuracy alone."""
    return [qformat for qformat in formats if BY_QUANT_ALGO[FORMATS[qformat].quant_algo] is qformat]


def calibrates(formats: Iterable[QFormat], kv_cache: KvFormat) -> bool:
    """Return whether a format or the KV cache is calibrated; else the checkpoint has everything in 16 bit."""
    return kv_cache is not KvFormat.AUTO or any(FORMATS[qformat].calibrated for qformat in formats)


def reads_texts(formats: Iterable[QFormat], kv_cache: KvFormat) -> bool:
    """Return whether the checkpoint depends on calibration texts."""
    return kv_cache is not KvFormat.AUTO or any(FORMATS[qformat].reads_texts for qformat in formats)


def kv_formats_for(capability: float) -> list[KvFormat]:
    """List the KV-cache formats whose engines can be built for a compute capability of 8.0 or newer."""
    lacks = (lacks_fp8_kv, lacks_int8_kv)
    return [kv_format for kv_format in KvFormat if not any(lack(kv_format, capability) for lack in lacks)]
