"""The shape of a decoder-only language model: the sizes that determine bytes, divisibility and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipelines.domain.errors import ConfigNumbers, UserError, shown
from pipelines.domain.families import FAMILIES, MULTIPLIERS, SIZED, SOFT_CAPS, Architecture, Family, SizedFamily
from pipelines.domain.mixture_layers import Latent, mixture_layers
from pipelines.domain.not_built import not_built, not_sized
from pipelines.domain.rotary import LAYER_TYPES, Rotary, check_rope


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model, dense or a mixture of experts. Lengths are in tokens.

    Attributes:
        architecture: Hugging Face class name, e.g. "LlamaForCausalLM"; empty for a model that this project cannot
            build and of which only the sizes are known.
        hidden_size: residual stream width.
        num_key_value_heads: KV heads (1 = MQA, fewer than query heads = GQA).
        head_dim: width of one head; Gemma's is not hidden / heads.
        intermediate_size: width of the MLP; in a mixture of experts, of one expert.
        max_position_embeddings: longest sequence the model supports.
        gated_mlp: whether the MLP has a gate (three linears instead of two).
        num_experts: experts per layer; 1 is a dense model.
        shared_size: width of the MLP that every token goes through beside a layer's experts; 0 is none.
        dense_layers: layers of a mixture that have one MLP instead of experts.
        dense_size: width of that MLP.
        latent: widths of multi-head latent attention; None is attention with KV heads.
        sliding_window: tokens that windowed layers attend to; 0 is no window.
        global_every: every n-th layer attends to all tokens despite the window; 0 is none.
        chunked: whether the window is a chunk that begins anew (Llama 4), and the KV cache keeps all tokens.
        windowed: which layers have the window, where neither all have it nor all but every n-th; else empty.
        norms_per_layer: RMS or layer norms, each with `hidden_size` weights.
        mxfp4: whether the model's folder has its experts in MXFP4.
        published: folders of the Hugging Face Hub that hold the model, by format.
        in_16_bit: what these have in 16 bit, by format: "attention"; "q_kv", all of attention but its output
            projection; "blocks", activations on their way to experts, because scales are of blocks.
        name: for display; two models with different names may have the same shape.
    """

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    gated_mlp: bool = True
    num_experts: int = 1
    num_experts_per_token: int = 1
    shared_size: int = 0
    dense_layers: int = 0
    dense_size: int = 0
    latent: Latent | None = None
    sliding_window: int = 0
    global_every: int = 0
    chunked: bool = False
    windowed: tuple[bool, ...] = ()
    norms_per_layer: int = 2
    mxfp4: bool = field(default=False, compare=False)
    published: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    in_16_bit: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    name: str = field(default="", compare=False)
    pruned_from: ModelShape | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], source: str = "config.json", *, name: str = "", buildable: bool = True
    ) -> ModelShape:
        """Read the shape from a parsed Hugging Face config.json of a gated decoder.

        Args:
            config: content of the file.
            source: name of the file, for messages.
            name: of the model, for display.
            buildable: refuse an architecture that this project does not know; sizing and simulation also take those of
                `SIZED`.

        Raises:
            UserError: the architecture is none of these, or numbers are missing or make no sense, all at once.
        """
        read = ConfigNumbers(config, source)
        architecture = read.architecture()
        supported = architecture in FAMILIES
        if buildable and not supported:
            read.refuse()
            raise not_built(config, source, architecture)
        if not supported and architecture not in SIZED:
            read.refuse()
            raise not_sized(config, source, architecture)
        if buildable:
            _check_stated(read, FAMILIES[architecture])
        config = read.config = (FAMILIES.get(architecture) or SIZED[architecture]).settled(config)
        heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
        kv_heads = read.size("num_key_value_heads", heads)
        family = FAMILIES.get(architecture)
        if read.fine and heads % kv_heads:
            read.fault(f"has num_key_value_heads={kv_heads}, which does not divide num_attention_heads={heads}.")
        if read.fine and (config.get("head_dim") is None or architecture in _WHOLE_HEADS) and hidden % heads:
            read.fault(f"has hidden_size={hidden}, which num_attention_heads={heads} does not divide.")
        sizes: dict[str, Any] = {
            "num_hidden_layers": read.size("num_hidden_layers"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": read.size("head_dim", max(1, hidden // heads)),
            "intermediate_size": _inner(read, architecture),
            "vocab_size": read.size("vocab_size"),
            "max_position_embeddings": read.size("max_position_embeddings"),
            "tie_word_embeddings": read.switch("tie_word_embeddings"),
            **_other_sizes(read, architecture),
        }
        shape = cls(architecture if supported else "", **sizes, mxfp4=holds_mxfp4(config), name=name)
        read.check_reals()
        if family is not None and buildable:
            _check_built(read, family, shape.head_dim)
        read.refuse()
        return shape

    @property
    def family(self) -> Family:
        """The family of this architecture."""
        return FAMILIES[self.architecture]

    @property
    def unpruned(self) -> ModelShape:
        """The shape before pruning: that of the model the user named."""
        return self.pruned_from or self

    def differences(self, other: ModelShape) -> list[str]:
        """List the fields in which two shapes differ."""
        names = [each.name for each in fields(self) if each.compare]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def window_layers(self) -> int:
        """Number of layers with the sliding window."""
        if not self.sliding_window:
            return 0
        if self.windowed:
            return sum(self.windowed)
        return self.num_hidden_layers - (self.num_hidden_layers // self.global_every if self.global_every else 0)

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that a layer's KV cache keeps, as a pattern repeated over the layers; empty where it keeps all."""
        if not self.sliding_window or self.chunked:
            return ()
        if self.windowed:
            return tuple(self.sliding_window if each else self.max_position_embeddings for each in self.windowed)
        if not self.global_every:
            return (self.sliding_window,)
        return (self.sliding_window,) * (self.global_every - 1) + (self.max_position_embeddings,)

    def with_windows(self, windows: Sequence[int] | None) -> ModelShape:
        """Return the model with other attention windows, a pattern repeated over the layers; empty keeps its own.

        Raises:
            UserError: the windows are not one size, with or without a last one that holds the whole context.
        """
        if not windows:
            return self
        context = self.max_position_embeddings
        *before, last = windows
        sizes = {min(window, context) for window in before or (last,)}
        if len(sizes) > 1 or (last not in sizes and last < context):
            raise UserError(
                f"The speed with attention windows of {', '.join(map(str, windows))} tokens is not modelled.",
                allowed="Modelled: one size for all layers, or one size and a whole context at the end of the pattern.",
            )
        (window,) = sizes
        if window >= context:
            return replace(self, sliding_window=0, global_every=0, windowed=())
        every = len(windows) if last >= context else 0
        return replace(self, sliding_window=window, global_every=every, windowed=())

    @property
    def output_params(self) -> int:
        """Weights of the output projection of one layer's attention."""
        width = self.latent.value_dim if self.latent else self.head_dim
        return self.num_attention_heads * width * self.hidden_size

    @property
    def attention_params(self) -> int:
        """Weights of q, k, v and the output projection of one layer. DeepSeek V3: 187,105,280."""
        if (mla := self.latent) is None:
            return self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        heads = self.num_attention_heads * (mla.plain_dim + mla.rope_dim)
        queries = mla.query_rank * (self.hidden_size + heads) if mla.query_rank else self.hidden_size * heads
        keys = mla.kv_rank * self.num_attention_heads * (mla.plain_dim + mla.value_dim)
        return queries + self.hidden_size * (mla.kv_rank + mla.rope_dim) + keys + self.output_params

    @property
    def kv_width(self) -> int:
        """Numbers that the KV cache of one layer holds of one token. DeepSeek V3: 512 + 64."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def expert_params(self) -> int:
        """Weights of the MLP of one layer; in a mixture of experts, of one expert."""
        return self._mlp_params(self.intermediate_size)

    @property
    def score_width(self) -> int:
        """Channels of a query and of a value head together, which prompts are multiplied in."""
        if (mla := self.latent) is None:
            return 2 * self.head_dim
        return mla.plain_dim + mla.rope_dim + mla.value_dim

    @property
    def latent_width(self) -> int:
        """The same when decoding by latent vectors, which serve as key and as value of all heads; 0 without them."""
        return 0 if self.latent is None else 2 * self.latent.kv_rank + self.latent.rope_dim

    @property
    def expert_layers(self) -> int:
        """Layers with experts; of a dense model all, whose MLP counts as the only expert."""
        return self.num_hidden_layers - self.dense_layers

    def _mlp_params(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * width

    @property
    def routed_params(self) -> int:
        """Weights of all experts of all layers, without those that every token goes through."""
        return self.expert_layers * self.num_experts * self.expert_params

    @property
    def common_params(self) -> int:
        """Weights of the linears that every token uses: attention, shared experts and the MLPs of dense layers."""
        shared = self.expert_layers * self._mlp_params(self.shared_size)
        dense = self.dense_layers * self._mlp_params(self.dense_size)
        return self.num_hidden_layers * self.attention_params + shared + dense

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear of one layer, by TensorRT-LLM name (qkv merged, experts combined)."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        inner = self.intermediate_size * self.num_experts
        mlp = {
            "mlp.fc": (inner, self.hidden_size),
            "mlp.gate": (inner, self.hidden_size),
            "mlp.proj": (self.hidden_size, inner),
        }
        if not self.gated_mlp:
            del mlp["mlp.gate"]
        return {"attention.qkv": (q + 2 * kv, self.hidden_size), "attention.dense": (self.hidden_size, q), **mlp}

    @property
    def linear_params(self) -> int:
        """Weights of all linears of all layers, with all experts: what quantization shrinks."""
        return self.common_params + self.routed_params

    @property
    def active_params(self) -> int:
        """Weights of the linears that one token uses."""
        return self.common_params + self.routed_params // self.num_experts * self.num_experts_per_token

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * self.hidden_size

    def params_in_16_bit(self, form: str) -> int:
        """Return how many weights of the linears a published folder in this format keeps in 16 bit."""
        kept = "attention" if self.mxfp4 and form == "none" else self.in_16_bit.get(form, "")
        output = self.output_params if kept == "q_kv" else 0
        return self.num_hidden_layers * (self.attention_params - output) if kept in ("attention", "q_kv") else 0

    def stored_bits(self, form: str, bits: float) -> tuple[float, float]:
        """Return mean bits of the linears that every token uses, and bits of the experts, in a format of `bits`.

        gpt-oss as published has experts in MXFP4, and no other linears.
        """
        share = self.params_in_16_bit(form) / self.common_params
        return 16 * share + bits * (1 - share), MXFP4_BITS if self.mxfp4 and form == "none" else bits

    @property
    def num_params(self) -> int:
        """All weights. Llama-3-8B: 8,030,261,248; Gemma-2B: 2,506,172,416; DeepSeek V3: 670,919,848,960.

        The routers of a mixture are not counted.
        """
        tables = self.head_params * (1 if self.tie_word_embeddings else 2)
        norms = self.hidden_size * (self.norms_per_layer * self.num_hidden_layers + 1)
        return self.linear_params + tables + norms


def holds_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a folder is gpt-oss as published: experts in MXFP4, which are read as a model in 16 bit."""
    block = config.get("quantization_config")
    is_it = config.get("architectures") == [Architecture.GPT_OSS]
    return is_it and isinstance(block, Mapping) and block.get("quant_method") == "mxfp4"


def implied_sizes(architecture: str) -> dict[str, Any]:
    """Return the fields of `ModelShape` that follow from a known architecture."""
    family = FAMILIES[architecture]
    return {
        "norms_per_layer": len(family.layer_norms),
        "sliding_window": family.sliding_window,
        "global_every": family.global_every or family.defaults.get("sliding_window_pattern", 0),
    }


MXFP4_BITS = 4.25
"""4 bits, and a scale of 8 bits for 32 weights."""
PHI3_ROPE = ("default", "longrope", "su", "yarn")
DTYPES = ("bfloat16", "float16", "float32", "float64")
_WHOLE_HEADS = (Architecture.LLAMA, Architecture.GEMMA2, Architecture.GEMMA3)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of gpt-oss: what the gate is multiplied by within the sigmoid, and where gate and up are clamped."""
_NULL_HEADS = (Architecture.LLAMA, Architecture.MISTRAL, Architecture.MIXTRAL)


def _check_stated(read: ConfigNumbers, family: Family) -> None:
    """Note values that the family's Transformers class rejects."""
    config, title = read.config, family.title
    kind = config.get("model_type", family.model_type)
    if kind != family.model_type:
        read.fault(
            f"has model_type={shown(kind)}, but names the architecture {family.architecture}.",
            f"Transformers reads it by its model_type, which must be '{family.model_type}'.",
        )
    absent = {} if family.architecture in _NULL_HEADS else {"head_dim": "hidden_size / num_attention_heads"}
    for key, usual in {**absent, **family.defaults}.items():
        value = config.get(key, usual)
        if value is None and usual is not None and key not in (*family.nulls, "rope_theta"):
            read.fault(f"has {key}=null, which {title} does not take.", f"Leave it out to have {str(usual).lower()}.")
        elif isinstance(usual, float) and type(value) is int and not key.startswith("rope_") and key not in MULTIPLIERS:
            read.fault(f"has {key}={value}.", "It must be written as a fraction, e.g. 1e-06.")
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    if (dtype := config.get(name)) is not None and dtype not in DTYPES:
        read.fault(f"has {name}={shown(dtype)}.", f"It must be one of {', '.join(DTYPES)}.")
    if config.get("text_config") is not None:
        read.fault(f"has a text_config, which {title} does not read.", "Give the folder of a text model.")
    _check_rows(read)


def _check_rows(read: ConfigNumbers) -> None:
    rows, padding = read.config.get("vocab_size"), read.config.get("pad_token_id")
    if padding is not None and type(rows) is int and not (type(padding) is int and -rows <= padding < rows):
        read.fault(
            f"has pad_token_id={shown(padding)} with vocab_size={shown(rows)}.",
            "It must be a row of the embedding; null is none.",
        )


def _check_built(read: ConfigNumbers, family: Family, head_dim: int) -> None:
    """Note values that Transformers does not run, or that no engine computes the same way."""
    config = read.config
    biased = "attention_bias" in family.defaults and read.switch("attention_bias")
    if biased and not family.attention_bias:
        read.fault(
            f"has attention_bias=true: TensorRT-LLM's {family.title} has no such bias.", "It must be false or absent."
        )
    if config.get("use_bidirectional_attention") and family.head_is_embedding:
        read.fault(
            "has use_bidirectional_attention=true.", "No engine computes it: a decoder sees earlier tokens alone."
        )
    for key in SOFT_CAPS:
        if key in family.defaults and family.defaults[key] is None and config.get(key):
            read.fault(f"has {key}={shown(config[key])}.", f"{family.title} is computed without it: it must be null.")
    if family.gpt_oss and config.get("swiglu_limit", SWIGLU_LIMIT) != SWIGLU_LIMIT:
        read.fault(f"has swiglu_limit={shown(config['swiglu_limit'])}.", f"Transformers computes {SWIGLU_LIMIT:g}.")
    _check_activation(read, family)
    kinds = read.items("layer_types")
    if config.get("layer_types") is not None and read.fine:
        _check_layer_types(read, kinds, read.size("num_hidden_layers"))
    if read.fine and "sliding_attention" in kinds and not _window(config):
        read.fault("has 'sliding_attention' in layer_types, but no sliding_window.", "State the window in tokens.")
    read.size("sliding_window", 0)
    check_rope(read, config, head_dim, by_layer_type="rope_local_base_freq" in family.defaults)
    kind = Rotary.of(config).kind if read.fine else "default"
    if family.architecture == Architecture.PHI3 and kind not in PHI3_ROPE:
        read.fault(f"has positions of type {shown(kind)}.", f"Phi-3 knows {', '.join(PHI3_ROPE)}.")
    if read.fine and head_dim % 2:
        read.fault(f"has head_dim={head_dim}.", "It must be even: rotary positions turn pairs of channels.")


def _window(config: Mapping[str, Any]) -> Any:
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def _check_activation(read: ConfigNumbers, family: Family) -> None:
    """Note a function of the MLP that a TensorRT-LLM checkpoint does not express: its only GELU is the tanh form."""
    key = next((name for name in ("hidden_activation", "hidden_act") if name in family.defaults), "hidden_act")
    activations = ("silu", "gelu_pytorch_tanh", *(("gelu",) if family.architecture == Architecture.GEMMA else ()))
    if (name := read.config.get(key)) is not None and name not in activations:
        read.fault(f"has {key}={shown(name)}.", f"Engines compute {', '.join(activations)}.")


def _other_sizes(read: ConfigNumbers, architecture: str) -> dict[str, Any]:
    """Return fields that only some configurations state; the architecture's own values take precedence."""
    if architecture not in FAMILIES:
        sized = SIZED[architecture]
        if sized.layers:
            return mixture_layers(read, sized)
        return _stated_experts(read, needed=read.has("num_local_experts", "num_experts")) | _windows(read, sized)
    family, implied = FAMILIES[architecture], implied_sizes(architecture)
    experts = _stated_experts(read, needed=True) if family.experts else {}
    return implied | experts | _windows(read, family)


def _inner(read: ConfigNumbers, architecture: str) -> int:
    """Return the width of the MLP, or of one expert where a configuration states both."""
    family = FAMILIES.get(architecture)
    if family is None or not family.experts:
        return read.size("intermediate_size")
    if read.items("mlp_only_layers") or read.size("decoder_sparse_step", 1) != 1:
        read.fault(
            "has layers without experts.", "Every layer must be a mixture: mlp_only_layers=[], decoder_sparse_step=1."
        )
    # without it Transformers takes a width of its own
    return read.size("moe_intermediate_size" if family.name == "qwen3_moe" else "intermediate_size")


def _stated_experts(read: ConfigNumbers, *, needed: bool) -> dict[str, int]:
    """Return the experts of a layer; those of a mixture must be stated, since each family has defaults of its own."""
    if not needed:
        return {}
    experts = read.size("num_local_experts" if read.has("num_local_experts") else "num_experts")
    chosen = read.size("num_experts_per_tok")
    if chosen > experts:
        read.fault(f"has num_experts_per_tok={chosen}, but only {experts} experts.")
    return {"num_experts": experts, "num_experts_per_token": chosen}


def _windows(read: ConfigNumbers, family: Family | SizedFamily) -> dict[str, Any]:
    """Read which layers have an attention window, as the family's configuration class of Transformers does."""
    none = {"sliding_window": 0, "global_every": 0}
    on = "use_sliding_window" not in family.defaults or read.switch("use_sliding_window")
    if "sliding_window" not in family.defaults or not on or read.config.get("sliding_window") is None:
        return none
    window, layers = read.size("sliding_window"), read.size("num_hidden_layers")
    if family.defaults.keys() & {"layer_types", "max_window_layers"} and read.fine:
        flags = _flags(read, family, layers)
    else:
        flags = (True,) * layers
    if not any(flags):
        return none
    every = flags.index(False) + 1 if False in flags else 0
    regular = flags == tuple(every == 0 or (number + 1) % every != 0 for number in range(layers))
    windows = {"sliding_window": window, "global_every": every if regular else 0}
    return windows if regular else {**windows, "windowed": flags}


def _flags(read: ConfigNumbers, family: Family | SizedFamily, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has the window."""
    kinds = read.items("layer_types")
    if not kinds and "max_window_layers" in family.defaults:
        first = read.size("max_window_layers", least=0)
        return tuple(number >= first for number in range(layers))
    if not kinds and "use_sliding_window" in family.defaults:  # SmolLM3: the layers without positions
        read.fault("has use_sliding_window=true without layer_types.", "It must say which layers have the window.")
    if not kinds:
        stated = "sliding_window_pattern" in family.defaults
        every = read.size("sliding_window_pattern", family.global_every) if stated else family.global_every
        return tuple((number + 1) % every != 0 for number in range(layers))
    _check_layer_types(read, kinds, layers)
    return tuple(kind == "sliding_attention" for kind in kinds)


def _check_layer_types(read: ConfigNumbers, kinds: Sequence[Any], layers: int) -> None:
    if unknown := [kind for kind in kinds if kind not in LAYER_TYPES]:
        read.fault(f"has {shown(unknown[0])} in layer_types.", f"Each must be one of {', '.join(LAYER_TYPES)}.")
    elif len(kinds) != layers:
        read.fault(f"has {len(kinds)} layer_types for num_hidden_layers={layers}.", "There must be one for each layer.")
