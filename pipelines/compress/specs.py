"""Compression settings as frozen records, validated when they are created."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.formats import FORMATS, KvFormat, QFormat, calibrates, mix_faults, scale_faults

Dtype = Literal["auto", "bfloat16", "float16"]
"""Element type of unquantized tensors; `auto` is the model's own 16-bit type."""

Layout = Literal["tensorrt_llm", "hugging_face"]
"""Output layout: a TensorRT-LLM checkpoint for trtllm-build, or a Hugging Face folder for its PyTorch backend."""

Scoring = Literal["gradient", "kl_div"]
"""How the effect of a format on one linear is judged: from gradients, or from the logits."""

Int4Scales = Literal["max", "mse"]
"""Scale of a group of INT4 weights: from its largest weight, or that with the least squared error."""

Fp4Inputs = Literal["max", "headroom"]
"""Scale of NVFP4 activations: from the largest that was seen, or with room above it."""

Sharding = Literal["none", "full"]
"""What several processes that train have of the weights: each all of them, or a part."""

SparsityMethod = Literal["magnitude", "sparsegpt"]

AWQ_CALIB_CAP = 32
"""Most texts AWQ calibrates with: its scale search per channel gains nothing from more; quantize.py caps it too."""


SEARCH_CAP = 4 * AWQ_CALIB_CAP
"""Most texts that a search calibrates with; ModelOpt gives AWQ a quarter of them."""


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """Settings of the search for a format for each linear; 16 bit is always among the choices.

    Attributes:
        candidates: formats to choose from.
        effective_bits: most bits per weight of the layers' linears on average, without scales of groups.
        scoring: how the effect of a format on one linear is judged.
        texts: how many texts it is judged on.
    """

    candidates: tuple[QFormat, ...]
    effective_bits: float
    scoring: Scoring = "gradient"
    texts: int = 128

    @property
    def most_texts(self) -> int:
        """Most texts that the search reads, to calibrate or to judge."""
        return max(SEARCH_CAP, self.texts)

    def __post_init__(self) -> None:
        """Reject what the search cannot do.

        Raises:
            UserError: lists all such values at once.
        """
        if faults := mix_faults(self.candidates, self.effective_bits):
            raise UserError.of(faults)


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Settings of one quantization.

    Attributes:
        qformat: format of the linears of every layer.
        kv_cache: element type of the KV cache.
        group_size: input channels per scale, if the format leaves a choice (NVFP4 always has 16).
        smoothquant_alpha: fraction of the outliers moved from activations to weights, 0..1, for int8_sq;
            None means ModelOpt's 1.0, or 0.5 for Gemma as in TensorRT-LLM's quantize.py.
        awq_alpha_step: step of AWQ's search over 0..1; None means ModelOpt's 0.1, or 1.0 for Gemma with
            w4a8_awq as in quantize.py.
        int4_scales: int4_rtn: scale of a group: from its largest weight, or that with the least squared error.
        fp4_inputs: nvfp4: scale of activations: from the largest that was seen, or with headroom above what was seen.
        search: for `auto`: how the format of each linear is chosen.
    """

    qformat: QFormat
    kv_cache: KvFormat = KvFormat.AUTO
    group_size: int = 128
    smoothquant_alpha: float | None = None
    awq_alpha_step: float | None = None
    int4_scales: Int4Scales = "max"
    fp4_inputs: Fp4Inputs = "max"
    search: SearchSpec | None = None

    @property
    def formats(self) -> tuple[QFormat, ...]:
        """Formats that ModelOpt calibrates: the candidates of a search, or the one format."""
        return self.search.candidates if self.search else (self.qformat,)

    @property
    def sixteen_bit(self) -> bool:
        """Whether a checkpoint has everything in 16 bit, so that nothing is calibrated or rounded."""
        return not calibrates(self.formats, self.kv_cache)

    def of(self, qformat: QFormat) -> QuantSpec:
        """Return the same settings for one candidate of the search, which the KV cache has no part in."""
        tuning = FORMATS[qformat].tuning
        return replace(
            self,
            qformat=qformat,
            kv_cache=KvFormat.AUTO,
            smoothquant_alpha=self.smoothquant_alpha if tuning == "smoothquant" else None,
            awq_alpha_step=self.awq_alpha_step if tuning == "awq" else None,
            int4_scales="max",
            fp4_inputs="max",
            search=None,
        )

    def __post_init__(self) -> None:
        """Reject values that would be ignored or make no sense.

        Raises:
            UserError: lists all such values at once.
        """
        if faults := _quant_faults(self):
            raise UserError.of(faults)


def _quant_faults(spec: QuantSpec) -> list[Fault]:
    faults = []
    alpha, step = spec.smoothquant_alpha, spec.awq_alpha_step
    tunings = {FORMATS[qformat].tuning for qformat in spec.formats}
    if (spec.qformat is QFormat.AUTO) != (spec.search is not None):
        faults.append(Fault(f"qformat={spec.qformat} with search={spec.search}.", "A search goes with qformat=auto."))
    if spec.group_size < 1:
        faults.append(Fault(f"group_size={spec.group_size} is too small.", "At least 1; usually 128 or 64."))
    if alpha is not None and "smoothquant" not in tunings:
        faults.append(Fault(f"smoothquant_alpha={alpha} does not apply to {spec.qformat}.", todo="Leave it out."))
    elif alpha is not None and not 0 <= alpha <= 1:
        faults.append(Fault(f"smoothquant_alpha={alpha} is out of range.", "Allowed: 0 to 1."))
    if step is not None and "awq" not in tunings:
        faults.append(Fault(f"awq_alpha_step={step} does not apply to {spec.qformat}.", todo="Leave it out."))
    elif step is not None and not 0 < step <= 1:
        faults.append(Fault(f"awq_alpha_step={step} is out of range.", "Allowed: above 0, up to 1."))
    faults += scale_faults(spec.qformat, spec.int4_scales, spec.fp4_inputs)
    return faults


@dataclass(frozen=True, slots=True)
class CalibrationSpec:
    """How many calibration texts to use, and how to cut them into batches.

    Attributes:
        size: texts to use; AWQ formats use at most 32 of them (`AWQ_CALIB_CAP`).
        seq_len: longest sequence, in tokens; longer texts are cut.
        batch_size: sequences per forward pass; affects speed and memory, not what is measured.
        seed: seed of every random number generator that calibration may use.
    """

    size: int = 512
    seq_len: int = 512
    batch_size: int = 1
    seed: int = 1234

    def __post_init__(self) -> None:
        """Reject sizes below one.

        Raises:
            UserError: lists all such sizes at once.
        """
        sizes = {"size": self.size, "seq_len": self.seq_len, "batch_size": self.batch_size}
        faults = [Fault(f"calibration.{k}={v} is too small.", "At least 1.") for k, v in sizes.items() if v < 1]
        if faults:
            raise UserError.of(faults)

    def sequences_for(self, qformat: QFormat) -> int:
        """Return how many texts this format is calibrated with."""
        return min(self.size, AWQ_CALIB_CAP) if FORMATS[qformat].tuning == "awq" else self.size


@dataclass(frozen=True, slots=True)
class RoundingSpec:
    """Rounding of weights after training, which training simulates.

    Attributes:
        qformat: a format that rounds weights by what they are alone.
        group_size: input channels per scale, if the format leaves a choice.
        dtype: type to which weights are converted before they are rounded; "auto" is the model's own 16-bit type.
    """

    qformat: QFormat
    group_size: int = 128
    dtype: Dtype = "auto"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank training: each weight W stays and W + alpha / rank x B A is computed with; A and B are trained.

    Attributes:
        rank: rows of A and columns of B.
        alpha: scale of the product.
        targets: names of the linears in a layer, e.g. "q_proj".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecoverySpec:
    """Training of a compressed model.

    Attributes:
        method: "finetune" on the texts, or "distill" towards a teacher.
        steps: updates of the weights.
        learning_rate: the highest.
        seq_len: tokens of a sequence.
        batch_size: sequences at once, in all processes together.
        accumulation: batches per update.
        evaluate_every: steps between two looks at texts that are not trained on.
        patience: looks in a row without anything better that end it.
        seed: of the order of sequences.
        precision: of the arithmetic.
        gradient_checkpointing: keep few activations and compute them twice.
        texts: how many texts to read; None is all.
        sparse: keep the zeros of the linears.
        rounding: rounding of weights that is simulated; None is none.
        lora: low-rank training; None trains all weights.
        processes: that share each batch.
        sharding: "full" gives each process a part of every weight, "none" the whole model.
    """

    method: Literal["finetune", "distill"]
    steps: int
    learning_rate: float
    seq_len: int
    batch_size: int
    accumulation: int
    evaluate_every: int
    patience: int
    seed: int
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    texts: int | None = None
    sparse: bool = False
    rounding: RoundingSpec | None = None
    lora: LoraSpec | None = None
    processes: int = 1
    sharding: Sharding = "none"

    def __post_init__(self) -> None:
        """Reject sharding among one.

        Raises:
            UserError: one process has nobody to share the model with.
        """
        if self.sharding == "full" and self.processes == 1:
            raise UserError(
                "recover.sharding=full needs recover.processes >= 2: one process trains.",
                todo="Set recover.processes=2 or more, or recover.sharding=none.",
            )


@dataclass(frozen=True, slots=True)
class SparsitySpec:
    """2:4 sparsity: of four neighbouring input channels at least two are zero.

    Attributes:
        method: "magnitude" keeps the two largest of four and needs no data; "sparsegpt" weighs them by
            how strongly the layer's inputs amplify them (second order), and needs calibration texts.
    """

    method: SparsityMethod

    def __post_init__(self) -> None:
        """Reject an unknown method.

        Raises:
            UserError: the method is unknown.
        """
        if self.method not in get_args(SparsityMethod):
            raise UserError(
                f"sparsity.method='{self.method}' is not known.", allowed="Choose one of magnitude, sparsegpt."
            )
