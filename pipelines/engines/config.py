"""The groups `engine`, `runtime` and `hardware`: what is built, for which GPU, and how it is run."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from pipelines.settings.base import Group, Positive, Ranks

Amount = Annotated[float, Field(ge=0)]


EngineName = Literal[
    "auto",
    "openvino",
    "tensorrt_llm",
    "tensorrt_llm_llmapi",
    "tensorrt_edge",
]


class EngineOptions(Group):
    """Options of one engine.

    `DECIDE_SCORES` names the options that change the result of an evaluation; others let a stored result be reused.
    `DECIDE_BYTES` names those of the build, which the built engine carries from then on.
    """

    DECIDE_SCORES: ClassVar[tuple[str, ...]] = ()
    DECIDE_BYTES: ClassVar[tuple[str, ...]] = ()


def all_options(options: EngineOptions | None) -> dict[str, Any]:
    """Return the options that an engine is run with, by name; none for an engine without any."""
    return options.model_dump(exclude=set(options.DECIDE_BYTES)) if options else {}


def options_of_build(options: EngineOptions | None) -> dict[str, Any]:
    """Return those that change what is built, where they are not at their defaults."""
    return options.model_dump(include=set(options.DECIDE_BYTES), exclude_defaults=True) if options else {}


def options_of_scores(options: EngineOptions | None) -> dict[str, Any]:
    """Return those that change what an engine computes."""
    return options.model_dump(include=set(options.DECIDE_SCORES)) if options else {}


class OpenVinoSettings(EngineOptions):
    """How the CPU engine computes; `head_precision` and `experts` change what is built.

    Attributes:
        inference_precision: type of the arithmetic between quantized products; `auto` is bf16 where the CPU has
            native bf16 (AMX or AVX512_BF16) and f32 elsewhere, where emulated bf16 is about 50 times slower.
        num_threads: threads of the CPU plugin; None is all physical cores.
        kv_cache_bytes: size of the paged KV cache; None is room for 32 requests of max_seq_len tokens, at most 1 GiB
            and at least one request. A pool full of cached prefixes is searched for the oldest, so larger is slower.
        kv_cache_precision: storage of the paged KV cache; `auto` is u8 for a checkpoint with an 8-bit KV cache;
            otherwise bf16 where the CPU has native bf16, f16 elsewhere, and f32 if inference_precision is f32, or bf16
            on a CPU that only emulates it.
        dynamic_quantization: how many neighbouring activations share a scale when they are rounded to INT8 on their way
            into a linear with weight-only quantization, which is up to twice as fast; `off` leaves them as they are.
            `auto` is 128 for weight-only formats, and off where inference_precision names the arithmetic. Without VNNI,
            and in bf16 on a processor with AMX, nothing is rounded, whatever is asked for.
        head_precision: `int8` rounds the output head to INT8 with a scale per token of the vocabulary, which halves
            what a token reads of it; `checkpoint` is as the checkpoint has it, in 16 bits. Baselines keep theirs.
        experts: how a mixture is multiplied: `grouped`, one product for all experts, in bf16 on a processor with AMX;
            `separate`, products of each expert. `auto` is grouped with AMX and up to four experts for each one that a
            token goes through. With more, grouped is faster for tokens of one user only, and slower for long prompts.
    """

    LATER: ClassVar[tuple[str, ...]] = ("head_precision", "experts")
    DECIDE_SCORES: ClassVar[tuple[str, ...]] = ("inference_precision", "dynamic_quantization")
    DECIDE_BYTES: ClassVar[tuple[str, ...]] = ("head_precision", "experts")

    inference_precision: Literal["auto", "f32", "bf16"] = "auto"
    num_threads: Ranks | None = None
    kv_cache_bytes: Positive | None = None
    kv_cache_precision: Literal["auto", "f32", "bf16", "f16", "u8", "u4"] = "auto"
    dynamic_quantization: Literal["auto", "off", "32", "128"] = "auto"
    head_precision: Literal["checkpoint", "int8"] = "checkpoint"
    experts: Literal["auto", "grouped", "separate"] = "auto"

    @field_validator("dynamic_quantization", mode="before")
    @classmethod
    def _is_a_word(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class EngineSettings(Group):
    """Which engine runs the model.

    Attributes:
        name: the engine; auto is TensorRT-LLM where a GPU and tensorrt_llm are, else OpenVINO.
        path: folder of an engine that is already built; nothing is quantized or built then.
        openvino: options of the CPU engine.
    """

    name: EngineName
    path: Path | None = None
    openvino: OpenVinoSettings = Field(default_factory=OpenVinoSettings)

    def in_16_bit(self) -> Self:
        """Return these settings for a model without rounded weights, before which alone activations are rounded."""
        usual = {"dynamic_quantization": "auto", "head_precision": "checkpoint"}
        return self.model_copy(update={"openvino": self.openvino.model_copy(update=usual)})

    def with_checkpoints_arithmetic(self) -> Self:
        """Return these settings with activations rounded only as the checkpoint says, unless more is asked for."""
        if self.openvino.dynamic_quantization != "auto":
            return self
        options = self.openvino.model_copy(update={"dynamic_quantization": "off"})
        return self.model_copy(update={"openvino": options})


class RuntimeSettings(Group):
    """How an engine is run.

    Attributes:
        enable_chunked_context: process long prompts in pieces, between which other requests go on.
    """

    enable_chunked_context: bool = False


class HardwareSettings(Group):
    """The GPU the engine is meant for, as data sheets give it; `auto` knows only its name.

    Attributes:
        name: of the file under conf/hardware; auto is the GPU of this machine.
        gpu: name of the product.
        nvidia_smi: names that nvidia-smi gives it.
        arch: architecture and chip.
        sm: compute capability, e.g. 9.0.
        memory_gb: memory, GB of 10^9 bytes.
        reported_gb: memory as the driver counts it; null derives it from `memory_gb`.
        mem_bw_gb_s: bandwidth of the memory, GB/s.
        fp16_dense_tflops: 16-bit arithmetic without sparsity, TFLOP/s.
        fp8_dense_tflops: 8-bit floating-point arithmetic without sparsity, TFLOP/s; null is none.
        int8_dense_tops: 8-bit integer arithmetic without sparsity, TOP/s; null is none.
        fp4_dense_tflops: 4-bit floating-point arithmetic without sparsity, TFLOP/s; null is none.
        sparse_multiplier: speed of 2:4 sparse arithmetic over dense arithmetic; null is none.
        nvlink_gb_s_bidir: NVLink, both directions together, GB/s; null is none.
        pcie_gb_s_per_dir: PCIe, each direction, GB/s.
        c2c_gb_s_per_dir: NVLink-C2C to the memory of a Grace CPU, each direction, GB/s; null is none.
        gpus_per_server: GPUs of one server.
        tdp_w: power, W.
    """

    name: str
    gpu: str | None = None
    nvidia_smi: tuple[str, ...] = ()
    arch: str | None = None
    sm: Amount | None = None
    memory_gb: Amount | None = None
    reported_gb: Amount | None = None
    mem_bw_gb_s: Amount | None = None
    fp16_dense_tflops: Amount | None = None
    fp8_dense_tflops: Amount | None = None
    int8_dense_tops: Amount | None = None
    fp4_dense_tflops: Amount | None = None
    sparse_multiplier: Amount | None = None
    nvlink_gb_s_bidir: Amount | None = None
    pcie_gb_s_per_dir: Amount | None = None
    c2c_gb_s_per_dir: Amount | None = None
    gpus_per_server: Positive | None = None
    tdp_w: Amount | None = None

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return none: there is no figure to change before a GPU is chosen by name."""
        return {}
