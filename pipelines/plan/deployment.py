"""What will run: the settings as resolved, the engine, the machine and the user's inputs, in one record."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pipelines.checkpoint.declarations import kind_faults, quantization_of
from pipelines.checkpoint.given import given_format
from pipelines.checkpoint.llava import VisionShape
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat, group_instead
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.variant import Variant
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import EngineDescription
from pipelines.engines.tensorrt_llm.config import NOT_SPECULATING
from pipelines.engines.tensorrt_llm.llm_api import LlmApiOptions, merged, tuned_files
from pipelines.engines.tuning import Recommended, adjusted, advice, tuned
from pipelines.host.machine import Machine, torch_device
from pipelines.plan.targets import Goal
from pipelines.plan.user_inputs import UserInputs
from pipelines.predict.performance.gpus import resolved
from pipelines.predict.performance.limits import ChosenLimits, with_limits
from pipelines.rules.record import DeploymentFacts
from pipelines.settings.model import ModelSettings
from pipelines.store.sources import BuiltEngine, InputSource, model_config
from triton_repo.tensors import BLS

OF_ADAPTERS = ("lora_plugin", "lora_target_modules")
DRAFT_ALONE = {**NOT_SPECULATING, "max_prompt_embedding_table_size": 0, "weight_sparsity": False}
"""Build settings that a draft model is built without, because it answers like any other engine."""


@dataclass(frozen=True)
class Deployment(Goal):
    """One engine and all that is made around it.

    Other engines of the same plan (`baseline`, `reference`, `draft`) are deployments derived from it.

    Attributes:
        settings: as resolved: questions chosen, tuned for the engine, with the limits chosen for the load.
        target: of the command.
        engine: that runs it.
        inputs: what the user has on disk.
        shape: of the model, where known; after pruning.
        limits: of an engine on the GPU, where they were chosen for the load.
        prefix: of the ids of its stages, e.g. "baseline.".
    """

    engine: EngineDescription
    machine: Machine
    inputs: UserInputs = field(default_factory=UserInputs)
    shape: ModelShape | None = None
    limits: ChosenLimits | None = None
    prefix: str = ""

    @cached_property
    def gpu(self) -> HardwareSettings:
        """The GPU that is named or found."""
        return resolved(self.settings.hardware, self.machine)

    @property
    def device(self) -> str:
        """Where PyTorch computes: "cpu" or "cuda"."""
        return torch_device(self.machine)

    @property
    def built(self) -> BuiltEngine | None:
        """Facts of the engine given with engine.path."""
        return self.inputs.built

    @property
    def sources(self) -> dict[str, InputSource]:
        """The user's files on disk, by the names under which stages read them."""
        return self.inputs.sources

    @property
    def on_model(self) -> bool:
        """Whether compression and build are part of it."""
        return self.built is None and not self.is_elsewhere

    @property
    def unpruned(self) -> ModelShape | None:
        """The shape before pruning, where known."""
        return None if self.shape is None else self.shape.unpruned

    @property
    def positions(self) -> int | None:
        """The model's longest sequence in tokens, where known."""
        return None if self.shape is None else self.shape.max_position_embeddings

    @property
    def variant(self) -> Variant:
        """The compression; an engine built elsewhere may have a KV cache in a format that no setting names."""
        return self.built.variant if self.built else self.settings.variant

    @property
    def label(self) -> str:
        """The name of its artifacts."""
        return f"{self.settings.model.label}-{self.variant.label}"

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """How the model's folder says that it is quantized; None for one in 16 bit, or that is not known yet."""
        folder = self.model_folder
        return quantization_of(folder, model_config(folder)) if folder is not None and folder.is_dir() else None

    @property
    def model_folder(self) -> Path | None:
        """The folder of the model, or of what is known of it before its download; None if nothing is."""
        model = self.settings.speculative.draft if self.prefix == "draft." else self.settings.model
        return None if model is None else model.folder or self.inputs.hub_folders.get(model)

    @property
    def imports(self) -> bool:
        """Whether the checkpoint takes over a quantized folder, and its cache's scales, and calibrates nothing."""
        block, cache = self.quantization, self.settings.kv_cache.dtype
        if block is None or cache is KvFormat.AUTO:
            return block is not None
        return not any(kind_faults("", block)) and given_format(block).kv_cache is cache

    @property
    def has_fidelity(self) -> bool:
        """Whether predictions are compared with the 16-bit model's; within `all`, where that is built anyway."""
        reference = self.has_baseline or self.settings.fidelity.reference_path is not None
        return self.compares and self.engine.gives_logits and reference

    @property
    def is_for_a_named_gpu(self) -> bool:
        """Whether a GPU is planned for by name, which may be in another machine."""
        return bool(self.engine.builder) and self.settings.hardware.name != "auto"

    @cached_property
    def tuned(self) -> Self:
        """The same with the advice for its engine on the GPU."""
        return replace(self, settings=tuned(self.settings, self.engine, self.shape, self.gpu))

    @cached_property
    def limited(self) -> Self:
        """The same with the limits that were chosen for the load."""
        return self if self.limits is None else replace(self, settings=with_limits(self.settings, self.limits))

    @cached_property
    def baseline(self) -> Self:
        """The engine of the same model in 16 bit, tuned for its own format."""
        alone = replace(self, settings=self.settings.baseline(), shape=self.unpruned, limits=None, prefix="baseline.")
        return alone.tuned

    @property
    def reference_model(self) -> ModelSettings:
        """The model that is compared with in 16 bit."""
        path, model = self.settings.fidelity.reference_path, self.settings.model
        return model if path is None else model.model_copy(update={"path": path})

    @cached_property
    def reference(self) -> Self:
        """The 16-bit engine to compare predictions with: the baseline, or that of another model."""
        if self.settings.fidelity.reference_path is None:
            return self.baseline
        settings = self.settings.baseline().model_copy(update={"model": self.reference_model})
        return replace(self, settings=settings, shape=self.inputs.reference, limits=None, prefix="reference.").tuned

    @property
    def draft_shape(self) -> ModelShape | None:
        """The shape of the draft model, where known."""
        return self.inputs.draft or self.settings.speculative.draft_shape

    @cached_property
    def draft(self) -> Self | None:
        """The engine of the draft model, tuned for its own format; None without one."""
        guess, quant, build = self.settings.speculative, self.settings.quant, self.settings.build
        if guess.mode != "draft_target" or guess.draft is None or guess.draft_qformat is None:
            return None
        own = build if guess.draft_qformat == quant.qformat else build.in_16_bit()
        longest, target, draft = build.max_seq_len, self.positions, self.draft_shape
        if longest is None and target and draft and draft.max_position_embeddings > target:
            longest = target  # else its own longest sequence
        changed = {
            "quant": quant.model_copy(update={"qformat": guess.draft_qformat}),
            "build": own.without(OF_ADAPTERS).model_copy(update={**DRAFT_ALONE, "max_seq_len": longest}),
        }
        return replace(self.with_groups(**changed), shape=self.draft_shape, limits=None, prefix="draft.").tuned

    def changed(self, change: str) -> Self:
        """Return the same with overrides such as "build.tp_size=2 quant=fp8", as messages propose them."""
        groups: dict[str, Any] = {}
        for word in change.split():
            key, _, value = word.partition("=")
            group, _, name = key.partition(".")
            held = groups.get(group) or getattr(self.settings, group)
            name = name or {"quant": "qformat", "kv_cache": "dtype"}[group]
            values = held.model_dump(exclude_none=True, exclude_unset=True) | {name: value}
            if name == "qformat":  # as the file of the other format does
                values["group_size"] = group_instead(held.qformat, held.group_size, QFormat(value))
                values = {key: fields for key, fields in values.items() if key not in held.SEARCH}
            groups[group] = type(held).judged(values, f"{group}.")
        return self.with_groups(**groups)

    @property
    def tuning_notes(self) -> tuple[str, ...]:
        """A line for each default that gives way to another setting, and for each setting that the tuning chooses.

        The latter also for the baseline, where that is built and differs.
        """
        changed = tuple(each.line for each in adjusted(self.settings, self.engine, self.shape))
        if not self.engine.recommends:
            return changed
        if self.settings.tuning.name == "plain":
            return (*changed, "tuning=plain: nothing is set for speed; tuning=recommended does")
        own = self._advice
        lines = [f"tuning: {each.line}" for each in own]
        if self.has_baseline:
            base = self.baseline._advice
            lines += [f"tuning of the 16-bit baseline: {each.line}" for each in base if each not in own]
            lacks = [each.word for each in own if each not in base]
            lines += [f"tuning of the 16-bit baseline: without {', '.join(lacks)}"] if lacks else []
        return (*changed, *lines)

    @property
    def _advice(self) -> tuple[Recommended, ...]:
        return advice(self.settings, self.engine, self.shape, self.gpu)

    @property
    def facts(self) -> DeploymentFacts:
        """The input of the rules."""
        guess, images, quant = self.settings.speculative, self.settings.multimodal, self.settings.quant
        return DeploymentFacts(
            needs_gpu=self.engine.needs_gpu,
            writes_engine=self.engine.writes_engine,
            on_device=self.engine.on_device,
            label=self.settings.model.label,
            shape=self.shape,
            qformat=quant.qformat,
            candidates=quant.mixed,
            dtype=quant.dtype,
            kv_format=self.settings.kv_cache.dtype,
            group_size=quant.group_size,
            sparsity=self.settings.sparsity.method,
            sm=self.gpu.sm,
            gpus_per_server=self.gpu.gpus_per_server,
            kv_reuse=self.settings.kv_cache.enable_block_reuse,
            chunked_context=self.settings.runtime.enable_chunked_context,
            build=self.settings.build,
            triton=self.settings.triton,
            dynamic_quantization=self.settings.engine.openvino.dynamic_quantization,
            through_bls=self.settings.benchmark.model_name == BLS,
            speculation=guess.mode,
            draft=self.draft_shape,
            draft_depth=guess.num_heads or guess.num_layers,
            same_vocabulary=self.inputs.same_vocabulary,
            pickled_heads=self.inputs.pickled_heads,
            adapters=self.inputs.adapters,
            images=images if images.visual_tokens is not None and images.model_type != "none" else None,
            tiled=self.encoder is not None and bool(self.encoder.grids),
            rotary=self.inputs.rotary,
            llm_api=self.llm_api,
        )

    @cached_property
    def encoder(self) -> VisionShape | None:
        """Sizes of a LLaVA's encoder; None without one."""
        images = self.settings.multimodal
        if images.model_type == "llava" and images.path is not None:
            with suppress(UserError):  # another check says what is wrong with it
                return VisionShape.read(images.path)
        return None

    @property
    def picture_tokens(self) -> int | None:
        """Visual tokens of a picture of the workload; None for a model that reads text alone."""
        side = self.settings.workload.image_side
        if self.encoder is None or not self.encoder.grids:
            return self.settings.multimodal.visual_tokens
        return len(self.encoder.tiling.rows(side, side))

    @cached_property
    def llm_api(self) -> LlmApiOptions:
        """Options of the LLM API that are no settings."""
        group, version = self.settings.llm_api, self.settings.image.llm_api_version
        tuned = tuned_files().get(group.tuned) if group.tuned else None
        return LlmApiOptions(version, merged(tuned.options if tuned else {}, group.of_file), group.extra, group.tuned)
