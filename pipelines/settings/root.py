"""Typed settings, one class per group under conf/. They judge values; they never look at the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipelines.domain.errors import Fault, UserError, did_you_mean
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.settings.base import Group, Positive
from pipelines.settings.build import NOT_SPECULATING, BuildSettings
from pipelines.settings.cluster import ClusterSettings
from pipelines.settings.doctor import DoctorSettings
from pipelines.settings.features import LoraSettings, MultimodalSettings, SpeculativeSettings
from pipelines.settings.image import ImageSettings
from pipelines.settings.load import BenchmarkSettings, WorkloadSettings
from pipelines.settings.manifests import ManifestSettings
from pipelines.settings.model import ModelSettings, ShapeSettings
from pipelines.settings.nightly import NightlySettings
from pipelines.settings.report import ReportSettings
from pipelines.settings.serving import ServingSettings
from pipelines.settings.simulator import SimulatorSettings
from pipelines.settings.sizing import SizingSettings
from pipelines.settings.triton import TritonSettings

PROJECT_ROOT = Path(__file__).resolve().parents[2]


class QuantSettings(Group):
    """Weights and activations.

    Attributes:
        dtype: of everything that is not quantized; `auto` is the model's own 16-bit type.
    """

    qformat: QFormat
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    awq_alpha_step: Annotated[float, Field(gt=0, le=1)] | None = None


class SparsitySettings(Group):
    """2:4 sparsity of the linears."""

    method: Literal["none", "magnitude", "sparsegpt"]


class KvCacheSettings(Group):
    """Element type and reuse of the KV cache."""

    dtype: KvFormat
    enable_block_reuse: bool


class CalibrationSettings(Group):
    """Text that activations are observed on."""

    source: Literal["bundled", "hub", "local"]
    path: Path | None
    dataset: str | None
    revision: str | None
    split: str
    column: str
    size: Positive
    seq_len: Positive
    batch_size: Positive
    seed: int

    @model_validator(mode="after")
    def _has_source(self) -> CalibrationSettings:
        for source, key, given in (("local", "path", self.path), ("hub", "dataset", self.dataset)):
            if self.source == source and given is None:
                raise ValueError(f"source '{source}' needs calibration.{key}=...")
            if self.source != source and given is not None:
                raise ValueError(f"{key}='{given}' does not go with source '{self.source}': add calibration={source}")
        return self


class OpenVinoSettings(Group):
    """Options of the CPU engine."""

    inference_precision: Literal["auto", "f32", "bf16"]
    num_threads: Positive | None
    kv_cache_bytes: Positive | None
    kv_cache_precision: Literal["auto", "f32", "bf16", "f16", "u8", "u4"]


class EngineSettings(Group):
    """Which engine flavour, and the options of each; `path` takes an engine that is already built."""

    name: Literal["auto", "openvino", "tensorrt_llm", "tensorrt_llm_llmapi"]
    path: Path | None
    openvino: OpenVinoSettings


class RuntimeSettings(Group):
    """How an engine is run."""

    enable_chunked_context: bool


class EvalSettings(Group):
    """What the accuracy is measured on."""

    task: Literal["mini_mmlu", "mmlu"]
    num_fewshot: Annotated[int, Field(ge=0, le=5)]
    limit: Positive | None
    dataset: str | None
    revision: str | None
    dataset_path: Path | None


class HardwareSettings(Group):
    """The GPU the engine is meant for, as data sheets give it; `auto` knows only its name.

    `reported_gb` is its memory as the driver counts it; None derives it from the data sheet's `memory_gb`.
    """

    name: str
    gpu: str | None = None
    nvidia_smi: tuple[str, ...] = ()
    arch: str | None = None
    sm: float | None = None
    memory_gb: float | None = None
    reported_gb: float | None = None
    mem_bw_gb_s: float | None = None
    fp16_dense_tflops: float | None = None
    fp8_dense_tflops: float | None = None
    int8_dense_tops: float | None = None
    fp4_dense_tflops: float | None = None
    sparse_multiplier: float | None = None
    nvlink_gb_s_bidir: float | None = None
    pcie_gb_s_per_dir: float | None = None
    gpus_per_server: Positive | None = None
    tdp_w: float | None = None


class PathSettings(Group):
    """Where things are kept, relative to the current folder, and where TensorRT-LLM's example scripts are."""

    store: Path
    runs: Path
    trtllm_examples: Path


class VerifySettings(Group):
    """What `verify` looks at."""

    path: Path | None


class Settings(Group):
    """The whole configuration."""

    model: ModelSettings
    quant: QuantSettings
    sparsity: SparsitySettings
    kv_cache: KvCacheSettings
    calibration: CalibrationSettings
    engine: EngineSettings
    build: BuildSettings
    runtime: RuntimeSettings
    lora: LoraSettings
    speculative: SpeculativeSettings
    multimodal: MultimodalSettings
    eval: EvalSettings
    hardware: HardwareSettings
    triton: TritonSettings
    serving: ServingSettings
    workload: WorkloadSettings
    benchmark: BenchmarkSettings
    simulator: SimulatorSettings
    report: ReportSettings
    image: ImageSettings
    manifests: ManifestSettings
    cluster: ClusterSettings
    nightly: NightlySettings
    sizing: SizingSettings
    paths: PathSettings
    verify: VerifySettings
    doctor: DoctorSettings

    @property
    def variant(self) -> str:
        """The compression in one word: "fp8", "magnitude_2_4-int8_sq", "fp8-kv_int8", "none"."""
        parts = [] if self.sparsity.method == "none" else [f"{self.sparsity.method}_2_4"]
        if self.quant.qformat != QFormat.NONE or not parts:
            parts.append(self.quant.qformat.value)
        if self.kv_cache.dtype != KvFormat.AUTO:
            parts.append(f"kv_{self.kv_cache.dtype.value}")
        return "-".join(parts)

    def baseline(self) -> Settings:
        """The same model without any compression and guessing nothing ahead; what accuracy is compared with."""
        return self.model_copy(
            update={
                "quant": QuantSettings(qformat=QFormat.NONE),
                "sparsity": SparsitySettings(method="none"),
                "kv_cache": self.kv_cache.model_copy(update={"dtype": KvFormat.AUTO}),
                "speculative": SpeculativeSettings.none(),
                "build": self.build.model_copy(update={"weight_sparsity": False, **NOT_SPECULATING}),
            }
        )


def validate(raw: Mapping[str, Any]) -> Settings:
    """Judge a composed configuration.

    Raises:
        UserError: every fault at once: the key, what was given, what is allowed.
    """
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        raise UserError.of([_fault(dict(item)) for item in error.errors()]) from None


def _fault(item: Mapping[str, Any]) -> Fault:
    """Say one pydantic finding in our four parts."""
    key = ".".join(str(part) for part in item["loc"])
    given = item.get("input")
    if item["type"] == "extra_forbidden":
        near = did_you_mean(str(item["loc"][-1]), _siblings(item["loc"]))
        return Fault(f"{key} is not a known key.", near)
    if item["type"] == "value_error":
        said = str(item["ctx"]["error"])
        return Fault(f"{key} {said}" if said.endswith("?") else f"{key} {said}.")
    if item["type"] in ("enum", "literal_error"):
        choices = str(item["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        hint = did_you_mean(str(given), choices.split(", "))
        return Fault(f"{key}='{given}' is not known.", f"Choose one of {choices}.", hint)
    if item["type"] == "tuple_type":
        return Fault(f"{key}='{given}' is not a list.", todo=f"Write {key}=[{given}].")
    return Fault(f"{key}='{given}' is not valid: {item['msg'][:1].lower() + item['msg'][1:]}.")


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Field names of the group a key was found in."""
    group: Any = Settings
    for part in loc[:-1]:
        annotation = group.model_fields[part].annotation
        group = annotation if hasattr(annotation, "model_fields") else ShapeSettings
    return list(group.model_fields)
