"""Predict the seconds of an engine iteration for a model, format and GPUs that were never measured (modelled).

`PerformanceModel.load().cost(setup)` returns the coefficients that the simulator runs on, their origin and their
usual error. Method: docs/decisions/0023-performance-model.md; accuracy: docs/sizing.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, UNIFORM, KvFormat, QFormat, formats_for, kv_formats_for, lacks_integers
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.gpus import SAME_CHIP, GpuSpec
from pipelines.predict.performance.limits import engine_sizes
from pipelines.predict.performance.memory import USUAL_GROUP, EngineSizes, rank_weight_bytes
from pipelines.predict.performance.models import models
from pipelines.predict.performance.physics import Facts, Parameters, expert_activation, facts, iteration_cost
from pipelines.predict.simulator.interface import Admission
from pipelines.predict.simulator.run import IterationCost
from pipelines.settings.root import Settings

# Inference frameworks: which versions share scheduling and costs. scripts/published knows those that were published.


@dataclass(frozen=True, slots=True)
class Framework:
    """One version of one framework.

    Attributes:
        name: as given, e.g. "TensorRT-LLM 0.12.0".
        family: group of versions with the same costs; a label of the parameters.
        engine: "tensorrt" or "pytorch", which several families share.
        admission: how requests get KV blocks.
        kv_follows: whether the KV cache is 8 bit when the weights are FP8 or FP4.
        ahead: whether a batch is chosen while the previous iteration runs.
        all_to_all: whether it has kernels that send a token only to the ranks of its experts.
    """

    name: str
    family: str
    engine: str
    admission: Admission
    kv_follows: bool
    ahead: bool = False
    all_to_all: bool = False


TENSORRT_LLM_1_2 = Framework(
    "TensorRT-LLM 1.2", "trtllm-torch", "pytorch", "GUARANTEED_NO_EVICT", kv_follows=True, ahead=True, all_to_all=True
)
Provenance = Literal["fitted", "transferred", "datasheet"]
WIDER: dict[Provenance, float] = {"fitted": 1.0, "transferred": 1.5, "datasheet": 2.5}
"""Factor that widens an interval when there are no residuals to derive it from."""
MIXTURES_OF = "trtllm-torch"
"""The family whose mixtures have parameters of their own, fitted by scripts/published_fit/mixtures.py."""
TILE = 64
"""Rows of a tile of FlashAttention 2, of which a head of a decoding request fills one."""
NARROW = 64
"""Width of a head at which attention takes as many exponentials for half the products of the usual 128."""
LEAST_CONFIGURATIONS = 3
"""A GPU on which a family was measured with fewer counts as transferred: one configuration cannot tell what is due to
the GPU from what is due to itself, and its neighbours were off as much as unseen ones."""
SPREAD = {"ttft": 0.40, "itl": 0.15, "throughput": 0.15}
"""Standard deviation of log(predicted / measured) assumed where nothing was fitted."""


def checkpoint_text(setup: "Setup") -> str:
    """Say which folder is sized, where this project does not make it; "" where it does."""
    model, form = setup.model, setup.qformat
    if model.architecture and model.published and QFormat.NONE not in model.published:  # a quantized folder on disk
        ((held, folder),) = model.published.items()
        stored = "several formats" if held == QFormat.AUTO else held
        other = f"{folder} is in {stored}; the figures are of quant={form} of its 16-bit original"
        return f"{folder} as published" if held == form else other
    if form in model.published:
        return f"{model.published[form]} as published, not made here"
    if model.published and not model.architecture:
        others = f"no published folder of {model.name} in {form} is known here (only {', '.join(model.published)})"
        return f"{others}, and none is made: sizes as if there were"
    return ""


def origin(provenance: Provenance, why: str) -> str:
    """Describe the origin of coefficients: "fitted to 3 loads ...", "transferred: L4 was measured ..."."""
    return why if provenance == "fitted" else f"{provenance}: {why}"


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on GPUs.

    Attributes:
        qformat: format of weights and activations.
        kv_format: element type of the KV cache.
        sparse: whether the weights are 2:4-sparse, and the engine may use kernels for that.
        tp: tensor parallel ranks.
        pp: pipeline parallel ranks.
        attention_dp: whether each of the `tp` ranks has the whole attention and requests of its own, and a part of the
            experts (attention data parallel, experts parallel).
        group_size: input channels asked to share a scale; formats without a choice take their own.
        gpu_weights_percent: share of the weights that stays on the GPU (Triton's name, although it is a fraction).
    """

    model: ModelShape
    gpu: GpuSpec
    qformat: QFormat = QFormat.NONE
    kv_format: KvFormat = KvFormat.AUTO
    sparse: bool = False
    tp: int = 1
    pp: int = 1
    attention_dp: bool = False
    runs_on: Framework = TENSORRT_LLM_1_2
    group_size: int = USUAL_GROUP
    gpu_weights_percent: float = 1.0

    @classmethod
    def of(cls, settings: Settings, model: ModelShape, gpu: GpuSpec) -> "Setup":
        """Return the deployment that the settings describe.

        Raises:
            UserError: the speed with these attention windows is not modelled.
        """
        build, triton, sizes = settings.build, settings.triton, engine_sizes(settings, model)
        return cls(
            model=model.with_windows(triton.max_attention_window_size),
            gpu=gpu,
            qformat=sizes.qformat,
            kv_format=sizes.kv_format,
            sparse=settings.sparsity.method != "none" and build.weight_sparsity,
            tp=sizes.tp_size,
            pp=sizes.pp_size,
            attention_dp=sizes.attention_dp,
            group_size=sizes.group_size,
            gpu_weights_percent=sizes.gpu_weights_percent,
        )

    @property
    def sparse_kernels(self) -> bool:
        """Whether kernels for 2:4-sparse weights run: TensorRT has them for linears that it multiplies itself."""
        return self.sparse and FORMATS[self.qformat].products_of_tensorrt

    @property
    def kind(self) -> str:
        """The label of mixtures of experts, or of dense models."""
        return f"kind={'mixture' if self.model.num_experts > 1 else 'dense'}"

    @property
    def labels(self) -> tuple[str, ...]:
        """Levels of the parameter hierarchy that this setup belongs to."""
        framework, gpu = self.runs_on, self.gpu
        return (
            f"engine={framework.engine}",
            f"family={framework.family}",
            f"version={framework.name}",
            f"gpu={SAME_CHIP.get(gpu.name, gpu.name)}",
            f"arch={gpu.family}",
            *(["sums=half rate"] if gpu.half_rate else []),
            f"form={FORMATS[self.qformat].activation}",
            self.kind,
            f"link={'experts over ' if self.attention_dp else ''}{gpu.link(self.tp)[0]}",
            *self._mixture_labels(framework),
            *self._tile_labels(f"{framework.family} {gpu.name}"),
            *([] if self.kv_format is KvFormat.AUTO else [f"kv8={framework.family} {gpu.family}"]),
        )

    def _tile_labels(self, served: str) -> tuple[str, ...]:
        """Levels of kernels that were profiled one by one; the link between ranks is a level of its own."""
        if not self.tile:
            return ()
        return (f"tiles={self.runs_on.family}", f"served={served}", *([f"ranks={served}"] if self.tp > 1 else []))

    @property
    def tile(self) -> int:
        """Rows of a tile that a decoding head fills beside prompts, 0 if none: vLLM outside Hopper and SM 10x."""
        return TILE if self.runs_on.family == "vllm" and not 9.0 <= self.gpu.sm < 12.0 else 0

    def _mixture_labels(self, framework: Framework) -> tuple[str, ...]:
        """Levels of a mixture where only TensorRT-LLM's PyTorch backend was fitted to mixtures other than Mixtral."""
        if self.model.num_experts <= 1 or framework.family != MIXTURES_OF:
            return ()
        as_published = self.model.mxfp4 and self.qformat is QFormat.NONE
        own = f"mxfp4={expert_activation(self.model, self.gpu, self.qformat)}"
        narrow = self.model.latent is None and self.model.head_dim <= NARROW
        some = {own: as_published, "heads=narrow": narrow}
        levels = (f"mixture={MIXTURES_OF}", f"mixture version={framework.name}")
        return (*levels, *(label for label, holds in some.items() if holds))

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp

    @property
    def lanes(self) -> int:
        """Batches that are in progress at the same time."""
        return self.sizes().lanes

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights on the fullest rank."""
        return rank_weight_bytes(self.sizes())

    def facts(self) -> Facts:
        """Compute the quantities of the model on these GPUs.

        TensorRT-LLM 1.2 sends tokens to the ranks of their experts where NVLink joins GPUs of SM 100 and later
        (`select_alltoall_method_type` of its Cutlass backend; `_mnnvl_utils.py` leaves out SM 120).
        """
        over, _ = self.gpu.link(self.tp)
        return facts(
            self.model, self.gpu, self.qformat, self.kv_format, tp=self.tp, pp=self.pp, sparse=self.sparse_kernels,
            group_size=self.group_size, streamed=(1 - self.gpu_weights_percent) * self.weight_bytes,
            attention_dp=self.attention_dp, tile=self.tile,
            all_to_all=self.runs_on.all_to_all and over == "nvlink" and 10.0 <= self.gpu.sm < 12.0,
        )  # fmt: skip

    def sizes(self, **limits: Any) -> EngineSizes:
        """Sizes from which `pipelines.predict.performance.memory` computes the split of the GPU's memory."""
        return self.resized(EngineSizes(self.model, self.qformat, windows=self.model.windows, **limits))

    def resized(self, sizes: EngineSizes) -> EngineSizes:
        """Return the sizes of an engine in this format and split."""
        return replace(
            sizes,
            qformat=self.qformat,
            kv_format=self.kv_format,
            tp_size=self.tp,
            attention_dp=self.attention_dp,
            pp_size=self.pp,
            group_size=self.group_size,
            gpu_weights_percent=self.gpu_weights_percent,
        )


@dataclass(frozen=True, slots=True)
class Costed:
    """Cost of a setup.

    Attributes:
        overhead_s: network and tokenizer, added to TTFT.
        client_gap_s: time from a response to the same user's next request in a closed loop.
        provenance: "fitted": this GPU and this family of frameworks were measured together, in at least
            `LEAST_CONFIGURATIONS`; "transferred": one of them was measured, or both with dense models and this is a
            mixture; "datasheet": neither was.
        why: the provenance in words.
        spread: standard deviation of log(predicted / measured) by metric: ttft, itl, throughput.
    """

    cost: IterationCost
    overhead_s: float
    client_gap_s: float
    provenance: Provenance
    why: str
    spread: Mapping[str, float]


@dataclass(frozen=True)
class PerformanceModel:
    """The performance model with its parameters."""

    parameters: Parameters

    @classmethod
    def load(cls) -> "PerformanceModel":
        """Load the model with the bundled parameters."""
        return cls(Parameters.load())

    def cost(self, setup: Setup) -> Costed:
        """Return the cost of an iteration.

        Raises:
            UserError: the GPU does not support the format, or the ranks do not divide the model.
        """
        refuse(setup)
        values = self.parameters.values(setup.labels)
        provenance, why = self.provenance(setup)
        spread = self.spread(provenance, setup.runs_on.family)
        family = setup.runs_on.family
        if self._fitted_to_dense(setup):
            of = spread if family == MIXTURES_OF else ("throughput",)  # stages of vLLM show its latencies to be nearer
            spread |= {metric: max(spread[metric], self.mixtures["spread"]) for metric in of}
        return Costed(
            cost=iteration_cost(setup.facts(), values),
            overhead_s=values["overhead_s"],
            client_gap_s=values["client_delay"],
            provenance=provenance,
            why=why,
            spread=spread,
        )

    @property
    def mixtures(self) -> Mapping[str, Any]:
        """What the fit of mixtures rests on: the GPUs of each model, and the spread of models that were left out."""
        known: Mapping[str, Any] = self.parameters.document.get("mixtures", {"models": {}, "spread": 0.0})
        return known

    def _fitted_to_dense(self, setup: Setup) -> bool:
        """Return whether this is a mixture, and its framework family was fitted to dense models alone."""
        return setup.model.num_experts > 1 and not self.parameters.knows(f"{setup.kind}+family={setup.runs_on.family}")

    def _not_measured(self, setup: Setup) -> str:
        """Say what of a mixture was not measured with its framework family; "" if all was, and of a dense model."""
        if not self._fitted_to_dense(setup):
            return ""
        if setup.runs_on.family != MIXTURES_OF:
            return "without mixtures of experts"
        if setup.tp > 1 and not setup.attention_dp:
            return "of mixtures of experts only on one GPU, or with attention data parallel ranks"
        on_gpu = [name for name, gpus in self.mixtures["models"].items() if setup.gpu.name in gpus]
        known = setup.model.name in on_gpu or any(models()[name] == setup.model for name in on_gpu)  # a folder's name
        return "" if known else f"with other mixtures of experts than {setup.model.name}"

    def provenance(self, setup: Setup) -> tuple[Provenance, str]:
        """Return the origin of a setup's coefficients, and the reason."""
        gpu, family = setup.gpu.gpu, setup.runs_on.family
        if setup.gpu_weights_percent < 1:
            speed = f"{setup.gpu.host / 1e9:g} GB/s of the data sheet"
            return "datasheet", f"weights are streamed at the {speed}, hidden by nothing"
        if setup.sparse_kernels:
            return "datasheet", "no measurement with 2:4-sparse weights"
        on_gpu = self.parameters.knows(f"gpu={setup.gpu.name}")
        if self.parameters.knows(f"gpu={setup.gpu.name}+family={family}", LEAST_CONFIGURATIONS):
            if lacking := self._not_measured(setup):
                return "transferred", f"{gpu} was measured with {family}, but {lacking}"
            return "fitted", f"fitted to measurements on {gpu} with {family}"
        if on_gpu or self.parameters.knows(f"family={family}"):
            measured = f"{gpu} was measured with other frameworks" if on_gpu else f"{family} was measured on other GPUs"
            return "transferred", measured
        return "datasheet", f"neither {gpu} nor {family} was measured"

    def spread(self, provenance: Provenance, family: str) -> dict[str, float]:
        """Return the standard deviation of log(predicted / measured) by metric, from cross-validation if available.

        It is the family's own where enough of it was measured.
        """
        measured = self.parameters.document.get("spread", {})
        measurements = measured.get("all", {}), measured.get(family, {})
        spread = {metric: usual * WIDER[provenance] for metric, usual in SPREAD.items()}
        for each in measurements:
            spread |= {metric: of[provenance] for metric, of in each.items() if provenance in of}
        return spread


def runnable(setup: Setup) -> list[QFormat]:
    """Return the weight formats that the setup's GPU and framework support for its model."""
    possible = formats_for(setup.gpu.sm) if setup.runs_on.family.startswith(("trtllm", "nim")) else list(UNIFORM)
    # the PyTorch backend runs it for every family that it supports
    if setup.model.architecture and not {"nvfp4", "llm_api"} & setup.model.family.features:
        possible = [qformat for qformat in possible if qformat is not QFormat.NVFP4]
    return [qformat for qformat in possible if FORMATS[qformat].activation in setup.gpu.peak]


def refuse(setup: Setup) -> None:
    """Refuse a setup that the GPU or the ranks do not allow.

    Raises:
        UserError: names the obstacle.
    """
    gpu, able = setup.gpu, runnable(setup)
    if gpu.sm < 8.0 and setup.runs_on.family.startswith(("trtllm", "nim")):
        what = f"{gpu.gpu} is too old for TensorRT-LLM: compute capability {gpu.sm:g}."
        raise UserError(what, allowed="It needs 8.0 (A100) or newer.")
    if setup.qformat not in able:
        raise UserError(_unsupported(setup), allowed=f"It supports: {', '.join(able)}.")
    if setup.kv_format not in (able_kv := kv_formats_for(gpu.sm)):
        raise UserError(
            f"An {setup.kv_format.upper()} KV cache on {gpu.gpu} is not modelled.",
            allowed=f"Choose {' or '.join(able_kv)}.",
        )
    name, heads, layers = setup.model.name, setup.model.num_attention_heads, setup.model.num_hidden_layers
    if setup.attention_dp and setup.model.num_experts % max(setup.tp, 1):
        raise UserError(
            f"{name} has {setup.model.num_experts} experts; tp_size={setup.tp} does not divide them.",
            todo="Each attention data parallel rank has as many experts: choose another build.tp_size or sizing.tp.",
        )
    if setup.tp < 1 or (heads % setup.tp and not setup.attention_dp):
        raise UserError(
            f"{name} has {heads} heads; tp_size={setup.tp} does not divide them.",
            allowed=f"Allowed: {', '.join(str(n) for n in (1, 2, 4, 8, 16) if heads % n == 0)}.",
        )
    if setup.tp > gpu.tp_most:
        raise UserError(
            f"The speed of tp_size={setup.tp} on {gpu.gpu} is not modelled: its ranks span several servers.",
            allowed=f"A server has {gpu.gpus_per_server}.",
            todo="Keep TP within a server and use pipeline stages across servers, e.g. build.tp_size="
            f"{gpu.gpus_per_server} build.pp_size=2.",
        )
    if not 1 <= setup.pp <= layers:
        raise UserError(f"pp_size={setup.pp} is not between 1 and {name}'s {layers} layers.")


def _unsupported(setup: Setup) -> str:
    """Say why a format is not among those that a setup supports."""
    form, gpu, quant = FORMATS[setup.qformat], setup.gpu, f"quant={setup.qformat}"
    if setup.qformat is QFormat.AUTO:
        return "The speed of quant=auto is not modelled: it depends on which linear gets which format."
    if lacks_integers(setup.qformat, gpu.sm):
        return f"TensorRT-LLM has no kernels for {quant} on {gpu.gpu}."
    if form.activation in gpu.peak:
        return f"{quant} is not supported for {setup.model.architecture} by TensorRT-LLM."
    return f"{quant} needs {form.activation.upper()} tensor cores; {gpu.gpu} has none."
