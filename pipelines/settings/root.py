"""The whole configuration as typed settings, one class per group of conf/. Settings never look at the machine."""

import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, model_validator

from eval.config import EvalSettings, FidelitySettings
from pipelines.compress.config import (
    CalibrationSettings,
    KvCacheSettings,
    PruningSettings,
    QuantSettings,
    RecoverSettings,
    SparsitySettings,
)
from pipelines.deploy.config import ClusterSettings, ImageSettings, ManifestSettings, MigrateSettings
from pipelines.doctor.config import DoctorSettings
from pipelines.domain.errors import Fault, refuse
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.variant import Variant
from pipelines.engines.config import EngineSettings, HardwareSettings, RuntimeSettings
from pipelines.engines.tensorrt_llm.config import NOT_SPECULATING, OWN_SETTINGS, BuildSettings, LlmApiSettings
from pipelines.loadgen.config import BenchmarkSettings, WorkloadSettings
from pipelines.nightly.config import NightlySettings
from pipelines.predict.config import SimulatorSettings, SizingSettings
from pipelines.report.config import ReportSettings
from pipelines.serving.config import ServingSettings
from pipelines.settings.base import Group, flat, group_in
from pipelines.settings.features import LoraSettings, MultimodalSettings, SpeculativeSettings
from pipelines.settings.model import ModelSettings
from pipelines.settings.paths import PathSettings, PlanSettings, StageSettings, StoreSettings, VerifySettings
from pipelines.stages.config import DiagnoseSettings
from triton_repo.config import TritonSettings

# The group `tuning`: whether options that make an engine faster are set without being asked for.


class TuningSettings(Group):
    """Options for speed left unset.

    Attributes:
        name: recommended sets what NVIDIA's guides and tuned files advise, wherever it fits; plain leaves the
            defaults of trtllm-build and the server. The CPU engine has nothing to set.
    """

    name: Literal["recommended", "plain"]


class Settings(Group):
    """The whole configuration."""

    LATER: ClassVar[tuple[str, ...]] = ("llm_api",)

    model: ModelSettings
    quant: QuantSettings
    prune: PruningSettings = Field(default_factory=PruningSettings)
    sparsity: SparsitySettings
    recover: RecoverSettings = Field(default_factory=RecoverSettings)
    kv_cache: KvCacheSettings
    calibration: CalibrationSettings
    engine: EngineSettings
    build: BuildSettings
    tuning: TuningSettings
    runtime: RuntimeSettings
    llm_api: LlmApiSettings = Field(default_factory=LlmApiSettings)
    lora: LoraSettings
    speculative: SpeculativeSettings
    multimodal: MultimodalSettings
    eval: EvalSettings
    fidelity: FidelitySettings
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
    store: StoreSettings
    plan: PlanSettings
    stage: StageSettings
    verify: VerifySettings
    diagnose: DiagnoseSettings
    doctor: DoctorSettings
    migrate: MigrateSettings

    @classmethod
    def group(cls, name: str) -> type[Group] | None:
        """Return the class of a group; None for one that only sets keys of others."""
        return group_in(cls.model_fields[name].annotation) if name in cls.model_fields else None

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of all groups, which the choices of conf/ are merged into."""
        return pickle.loads(cls._pickled_defaults())  # type: ignore[no-any-return]

    @classmethod
    @cache
    def _pickled_defaults(cls) -> bytes:
        return pickle.dumps({n: field.annotation.defaults() for n, field in cls.model_fields.items()})  # type: ignore[union-attr]

    @model_validator(mode="after")
    def _texts_follow_the_model(self) -> Self:
        chosen = {
            "eval": self.eval.for_model(self.model),
            "calibration": self.calibration.for_model(self.model),
            "fidelity": self.fidelity.for_model(self.model),
        }
        return self.model_copy(update=chosen)

    def every(self) -> dict[str, Any]:
        """Return all values as JSON has them, with each option of trtllm-build beside the settings of `build`."""
        return self.model_dump(mode="json") | {"build": self.build.every()}

    @property
    def variant(self) -> Variant:
        """The compression."""
        sizes, recover = tuple(self.prune.sizes.items()), self.recover
        formats = self.quant.qformat.value, self.kv_cache.dtype.value
        return Variant(sizes, self.sparsity.method, recover.method, recover.lora_rank, *formats)

    @property
    def is_compressed(self) -> bool:
        """Whether the model differs from its 16-bit baseline."""
        return self.variant != Variant()

    def as_built(self, variant: Variant, tp_size: int, pp_size: int) -> Self:
        """Return the settings with the ranks, and as far as they name them the formats, of an engine already built."""
        kv = KvFormat(variant.kv_cache) if variant.kv_cache in [*KvFormat] else KvFormat.AUTO
        return self.model_copy(
            update={
                "quant": self.quant.model_copy(update={"qformat": QFormat(variant.quant)}),
                "prune": PruningSettings(),
                "sparsity": SparsitySettings(method="none"),
                "recover": RecoverSettings(),
                "kv_cache": self.kv_cache.model_copy(update={"dtype": kv}),
                "build": self.build.model_copy(update={"tp_size": tp_size, "pp_size": pp_size}),
            }
        )

    def baseline(self) -> Self:
        """Return the settings of the accuracy baseline: the same model, uncompressed, without speculative decoding."""
        ranks = self.eval.baseline_tp_size or self.build.tp_size
        return self.model_copy(
            update={
                "quant": QuantSettings(qformat=QFormat.NONE),
                "prune": PruningSettings(),
                "sparsity": SparsitySettings(method="none"),
                "recover": RecoverSettings(),
                "kv_cache": self.kv_cache.model_copy(update={"dtype": KvFormat.AUTO}),
                "speculative": SpeculativeSettings.none(),
                "engine": self.engine.in_16_bit(),
                "build": self.build.in_16_bit().model_copy(update={"tp_size": ranks, **NOT_SPECULATING}),
            }
        )


def as_yaml(settings: Settings) -> str:
    """Return a resolved configuration as YAML, every value written out."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(settings.model_dump(mode="json"), Dumper=dumper, sort_keys=False)
    return text


def validate(raw: Mapping[str, Any]) -> Settings:
    """Validate a composed configuration.

    Raises:
        UserError: every fault at once: the key, what was given, what is allowed.
    """
    settings = Settings.judged(raw)
    return _with_options_of_file(settings) if settings.llm_api.file else settings


def _with_options_of_file(settings: Settings) -> Settings:
    """Return the settings with those values of `llm_api.file` that are settings here, which count as given."""
    faults, groups = list[Fault](), dict[str, Any]()
    for option, value in flat(settings.llm_api.of_file).items():
        own = OWN_SETTINGS.get(option)
        if own is None or value is None or not own.holds(value):
            continue
        group = groups.get(own.group, getattr(settings, own.group))
        setting, default = getattr(group, own.field), type(group).model_fields[own.field].default
        is_set = group.given(own.field) if own.field in getattr(group, "CHOSEN", ()) else setting != default
        if is_set and setting != own.value(value):
            what = f"llm_api.file sets {option}={value}, but {own.key}={setting} is given."
            faults.append(Fault(what, todo=f"Remove one of them: leave out {own.key}, or the line of the file."))
            continue
        values = group.model_dump(exclude_unset=True) | {own.field: own.value(value)}
        groups[own.group] = type(group).judged(values, f"{own.group}.")
    refuse(faults)
    return settings.model_copy(update=groups)
