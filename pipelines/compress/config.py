"""The groups `quant`, `sparsity`, `kv_cache` and `calibration`: what happens to weights, activations and cache."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.settings.base import ChoosingGroup, Group, HubName, Positive, Ranks, Revision, Tokens
from pipelines.settings.model import BUNDLED, ModelSettings

# The group `prune`: remove the least important layers, channels and heads.


class PruningSettings(Group):
    """Removal of MLP channels, attention heads or layers; the result is an ordinary, smaller model.

    Attributes:
        method: width makes every layer narrower, depth removes whole layers; none removes nothing.
        mlp: width: MLP channels that stay in every layer; null keeps all.
        heads: width: query heads that stay in every layer; null keeps all.
        kv_heads: width: KV heads that stay; null keeps all, or one for each query head where the model has that.
        layers: depth: layers that stay.
        texts: calibration texts on which importance is observed, each cut at calibration.seq_len.
    """

    SIZES: ClassVar[dict[str, tuple[str, ...]]] = {
        "none": (),
        "width": ("mlp", "heads", "kv_heads"),
        "depth": ("layers",),
    }

    EXAMPLES: ClassVar[dict[str, str]] = {
        "width": "add prune.mlp=..., prune.heads=... or both",
        "depth": "add prune.layers=...",
    }

    method: Literal["none", "width", "depth"] = "none"
    mlp: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    layers: Positive | None = None
    texts: Positive | None = None

    @property
    def prunes(self) -> bool:
        """Whether anything is removed."""
        return self.method != "none"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are given, by name."""
        names = ("mlp", "heads", "kv_heads", "layers")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        read = self.SIZES[self.method]
        for name, size in self.sizes.items():
            if name not in read:
                right = next(method for method, names in self.SIZES.items() if name in names)
                raise ValueError(f"{name}={size} has no effect on prune={self.method}: add prune={right}")
        if not self.prunes:
            if self.texts is not None:
                raise ValueError(f"texts={self.texts} has no effect on prune=none")
            return self
        if self.texts is None:
            raise ValueError(f"texts is null, but prune={self.method} needs it")
        if self.kv_heads is not None and self.heads is None:
            raise ValueError(f"kv_heads={self.kv_heads} needs prune.heads=...: the query heads that stay")
        if not self.sizes:
            raise ValueError(f"{read[0]} is null, but prune={self.method} needs a size: {self.EXAMPLES[self.method]}")
        return self


# The group `recover`: training that wins back what compression lost.


def _given(value: Any) -> Any:
    """Return a value as the command line takes it."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else value


Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear of a decoder layer, by its Hugging Face name."""
Rate = Annotated[float, Field(gt=0, le=1)]
UNTRAINED: Any = None
"""Default of what every training needs: null where nothing is trained, and refused where something is."""


class RecoverSettings(ChoosingGroup):
    """Training between sparsifying and quantizing.

    It reads the texts of the group `calibration` (source, path, dataset, split, column), all of them or `texts`.

    Attributes:
        method: finetune predicts the next token of the texts, distill what the original model predicts; none trains
            nothing.
        texts: how many texts to read; null is all.
        steps: updates of the weights.
        learning_rate: the highest; it rises for a twentieth of the steps and then falls as a cosine.
        seq_len: tokens of a sequence; texts are joined and cut.
        batch_size: sequences at once, in all processes together; more takes more memory.
        accumulation: batches per update.
        precision: of the arithmetic; bfloat16 is faster where the processor has it. Weights are kept in float32.
        gradient_checkpointing: compute activations twice and keep few of them; less memory, slower.
        evaluate_every: steps between two looks at the loss on texts that are not trained on; also between two places
            from which a stopped run goes on.
        patience: training ends when so many looks in a row found nothing better; the best weights are kept.
        seed: of the order of the texts.
        teacher: distill: folder of another model with the same tokenizer to learn from; null is the original model.
        lora_rank: train matrices of this rank beside the weights, and add them to the weights at the end; null trains
            all weights.
        lora_alpha: scale of what is added, as a multiple of 1 / rank; null is twice the rank.
        lora_targets: linears of each layer that get such matrices; null is all.
        processes: that share each batch; null is one on a CPU, and on GPUs as many as divide the batch.
        sharding: what each of several processes holds: none is the whole model, full a part of every weight, gradient
            and moment (FSDP), for models that do not fit one GPU.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = (
        *("steps", "learning_rate", "seq_len", "batch_size", "accumulation", "evaluate_every", "patience", "seed"),
    )

    method: Literal["none", "finetune", "distill"] = "none"
    texts: Positive | None = None
    steps: Positive = UNTRAINED
    learning_rate: Rate = UNTRAINED
    seq_len: Tokens = UNTRAINED
    batch_size: Positive = UNTRAINED
    accumulation: Positive = UNTRAINED
    precision: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool = False
    evaluate_every: Positive = UNTRAINED
    patience: Positive = UNTRAINED
    seed: Annotated[int, Field(ge=0)] = UNTRAINED
    teacher: Path | None = None
    lora_rank: Positive | None = None
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    lora_targets: tuple[Linear, ...] | None = None
    processes: Ranks | None = None
    sharding: Literal["none", "full"] = "none"

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return self.method != "none"

    @property
    def alpha(self) -> float | None:
        """Scale of low-rank training, given or usual; None if all weights are trained."""
        return self.lora_alpha or (None if self.lora_rank is None else 2.0 * self.lora_rank)

    @property
    def targets(self) -> tuple[Linear, ...]:
        """Linears of low-rank training, each once."""
        return tuple(name for name in get_args(Linear) if name in (self.lora_targets or get_args(Linear)))

    @property
    def lora(self) -> dict[str, Any] | None:
        """Rank, scale and linears of low-rank training; None if all weights are trained."""
        if self.lora_rank is None:
            return None
        return {"rank": self.lora_rank, "alpha": self.alpha, "targets": self.targets}

    def sharing(self, gpus: int) -> int:
        """Return how many processes train on a machine with so many GPUs that are trained on."""
        if self.processes is not None:
            return self.processes
        batch = self.batch_size or 1
        return max(number for number in range(1, max(1, gpus) + 1) if batch % number == 0)

    @model_validator(mode="after")
    def _low_rank(self) -> Self:
        for name, value in {"lora_alpha": self.lora_alpha, "lora_targets": self.lora_targets}.items():
            if value is not None and self.trains and self.lora_rank is None:
                raise ValueError(f"{name}={_given(value)} has no effect without low rank: add recover.lora_rank=16")
        if self.lora_targets == ():
            raise ValueError("lora_targets=[] leaves nothing to train: give at least one, or null for all")
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.batch_size is not None and self.batch_size % (self.processes or 1):
            raise ValueError(
                f"processes={self.processes} cannot share batch_size={self.batch_size} evenly: give a divisor of it"
            )
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if not self.trains:
            for name, value in self.changed((*self.CHOSEN, *type(self).model_fields)).items():
                if name != "method":
                    raise ValueError(f"{name}={_given(value)} has no effect on recover=none: add recover=distill")
            return self
        for name in self.CHOSEN:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is null, but recover={self.method} needs it")
        if self.teacher is not None and self.method != "distill":
            raise ValueError(f"teacher='{self.teacher}' has no effect on recover={self.method}: add recover=distill")
        return self


Dtype = Literal["auto", "bfloat16", "float16"]
"""Element type of unquantized tensors; `auto` is the model's own 16-bit type."""
Scoring = Literal["gradient", "kl_div"]
"""How the effect of a format on one linear is judged: from gradients, or from the logits."""
AWQ_CALIB_CAP = 32
"""Most texts AWQ calibrates with: its scale search per channel gains nothing from more; quantize.py caps it too."""
SEARCH_CAP = 4 * AWQ_CALIB_CAP
"""Most texts that a search calibrates with; ModelOpt gives AWQ a quarter of them."""


class QuantSettings(Group):
    """Weights and activations.

    Attributes:
        qformat: format of weights and activations.
        dtype: of everything that is not quantized; `auto` is the model's own 16-bit type.
        group_size: values of a weight's row that share one scale; for int4_awq, int4_gptq, int4_rtn, w4a8_awq.
        smoothquant_alpha: int8_sq: how much of the activations' range moves into the weights; null is ModelOpt's
            default.
        awq_alpha_step: int4_awq, w4a8_awq: step of the search for scales; null is ModelOpt's default.
        int4_scales: int4_gptq, int4_rtn: scale of a group, from its largest weight (max) or with the least squared
            error of rounding to nearest (mse).
        fp4_inputs: nvfp4: scale of activations, from the largest that was seen (max), or with room above what was seen
            and less below (headroom).
        effective_bits: auto: most bits per weight of the layers' linears on average, without scales of groups.
        candidates: auto: formats that a linear may get; 16 bit is always among the choices.
        scoring: auto: how the effect of a format on a linear is judged, from gradients or from the logits (kl_div).
        scoring_texts: auto: how many calibration texts it is judged on.
    """

    SEARCH: ClassVar[tuple[str, ...]] = ("effective_bits", "candidates", "scoring", "scoring_texts")

    qformat: QFormat
    dtype: Dtype = "auto"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    awq_alpha_step: Annotated[float, Field(gt=0, le=1)] | None = None
    int4_scales: Literal["max", "mse"] = "max"
    fp4_inputs: Literal["max", "headroom"] = "max"
    effective_bits: Annotated[float, Field(gt=0, le=16)] | None = None
    candidates: tuple[QFormat, ...] | None = None
    scoring: Scoring | None = None
    scoring_texts: Positive | None = None

    @property
    def formats(self) -> tuple[QFormat, ...]:
        """Formats that linears may have: the candidates of a search, or the one format."""
        return self.mixed or (self.qformat,)

    @property
    def mixed(self) -> tuple[QFormat, ...]:
        """Candidates of a search; none for a single format."""
        return (self.candidates or ()) if self.qformat is QFormat.AUTO else ()

    def of(self, qformat: QFormat) -> Self:
        """Return the settings for another format, as far as it reads them: a candidate, a draft model, a baseline."""
        other, form = self.model_copy(update={"qformat": qformat}), FORMATS[qformat]
        tunings = {FORMATS[each].tuning for each in other.formats}
        readers = {
            "smoothquant_alpha": "smoothquant" in tunings,
            "awq_alpha_step": "awq" in tunings,
            "int4_scales": form.searches_scales,
            "fp4_inputs": form.activation == "fp4",
            **dict.fromkeys(self.SEARCH, qformat is QFormat.AUTO),
        }
        unread = {name: type(self).model_fields[name].default for name, reads in readers.items() if not reads}
        return other.model_copy(update=unread)

    @property
    def mean_bits(self) -> float | None:
        """Most bits per weight that a searched mix has, with scales of groups; None for a single format."""
        if self.effective_bits is None or not self.mixed:
            return None
        scales = [FORMATS[each].bits_in_groups(self.group_size) - FORMATS[each].weights.bits for each in self.formats]
        return self.effective_bits + max(scales)

    @model_validator(mode="after")
    def _searches(self) -> Self:
        values = {name: getattr(self, name) for name in self.SEARCH}
        for name, value in values.items():
            if self.qformat is not QFormat.AUTO and value is not None:
                raise ValueError(f"{name}={_given(value)} has no effect on quant={self.qformat}: add quant=auto")
            if self.qformat is QFormat.AUTO and value is None:
                raise ValueError(f"{name} is null, but quant=auto needs it")
        if self.candidates == ():
            raise ValueError("candidates=[] leaves nothing to choose: give at least one")
        return self


class SparsitySettings(Group):
    """2:4 sparsity of the linears.

    Attributes:
        method: how two of each four weights are chosen to become zero; none keeps all weights.
    """

    method: Literal["none", "magnitude", "sparsegpt"] = "none"


class KvCacheSettings(ChoosingGroup):
    """Element type and reuse of the KV cache.

    Attributes:
        dtype: element type; auto is the model's 16-bit type, and null is chosen by the tuning, or else auto.
        enable_block_reuse: keep the blocks of prompts for later requests that begin alike; null is on, except with a
            KV cache whose format rules it out.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = ("dtype", "enable_block_reuse")

    dtype: KvFormat = KvFormat.AUTO
    enable_block_reuse: bool = True


SHIPPED = {"bundled": BUNDLED / "corpus.jsonl", "real_text": BUNDLED / "texts" / "calibration.jsonl"}
"""Calibration texts by the source that reads them."""
ABOUT = {
    "bundled": "bundled (the bundled models' synthetic domain)",
    "real_text": "real_text (dialogue, code and prose of free licences)",
}


SEED = 1234
"""Of the generators that ModelOpt or torch may draw from; the keys of artifacts have it."""


class CalibrationSettings(Group):
    """Text that activations are observed on.

    Attributes:
        source: where the text is from: the Hub, a local file, or shipped with the project: `real_text`, or `bundled`,
            which is about the bundled models' synthetic domain. `auto` is `bundled` for these, else `real_text`.
        path: local: a file (.txt, .jsonl, .json, .csv, .parquet) or a folder of such files.
        dataset: hub: the data set, org/name.
        revision: hub: branch, tag or commit of the data set; null is its default branch.
        split: hub: the split to read.
        column: field of a row that holds the text.
        size: sequences to observe; AWQ uses 32 at most.
        seq_len: tokens of one sequence; longer ones are cut.
        batch_size: sequences at once; more is faster and takes more memory.
    """

    BATCHING: ClassVar[frozenset[str]] = frozenset({"size", "seq_len", "batch_size"})
    """Fields that say how texts become batches, wherever the texts are from."""
    READ: ClassVar[dict[str, tuple[str, ...]]] = {
        "local": ("path", "column"),
        "hub": ("dataset", "revision", "split", "column"),
    }
    """The other fields, by the sources that read them; the first is needed."""

    source: Literal["auto", "bundled", "real_text", "hub", "local"] = "auto"
    path: Path | None = None
    dataset: HubName | None = None
    revision: Revision | None = None
    split: str = "train"
    column: str = "text"
    size: Positive = 128
    seq_len: Tokens = 512
    batch_size: Positive = 8

    @property
    def shipped(self) -> Path | None:
        """The text that ships with the project; None for another."""
        return SHIPPED.get(self.source)

    def sequences_for(self, qformat: QFormat) -> int:
        """Return how many texts this format is calibrated with."""
        return min(self.size, AWQ_CALIB_CAP) if FORMATS[qformat].tuning == "awq" else self.size

    def for_model(self, model: ModelSettings) -> Self:
        """Return the settings with the text that `auto` stands for."""
        chosen = "bundled" if model.is_bundled else "real_text"
        return self.model_copy(update={"source": chosen}) if self.source == "auto" else self

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        read = self.READ.get(self.source, ())
        if read and getattr(self, read[0]) is None:
            raise ValueError(f"source '{self.source}' needs calibration.{read[0]}=...")
        for key, value in self.changed(key for keys in self.READ.values() for key in keys if key not in read).items():
            works = " or ".join(f"calibration={source}" for source, keys in self.READ.items() if key in keys)
            raise ValueError(f"{key}='{value}' conflicts with source '{self.source}': add {works}")
        return self
