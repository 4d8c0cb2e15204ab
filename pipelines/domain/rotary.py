"""Rotary position embedding as a model's config.json states it, in the spelling of Transformers 4 or 5.

Transformers 5 is the reference. Source: `modeling_rope_utils.py` (`RotaryEmbeddingConfigMixin`), and
`configuration_gemma3.py` for positions that differ between windowed layers and the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pipelines.domain.errors import ConfigNumbers, shown
from pipelines.domain.families import Architecture, settled

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of scaling that both engines compute from a TensorRT-LLM checkpoint of any family."""
LONGROPE = "longrope"
"""The type of Phi-3 and Phi-4: a factor for each pair of channels, others beyond the original context."""
DEFAULT_BASE = 10000.0

_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "su": ("original_max_position_embeddings",),
    "mrope": (),
    "proportional": (),
}
"""Types of scaling that Transformers knows, in any family, and the numbers that each needs."""
_LISTS = {"longrope": ("short_factor", "long_factor"), "su": ("short_factor", "long_factor")}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
_LONGROPE_DIFFERS = (*_FACTORS, "factor", "short_mscale", "long_mscale")
_ORIGINAL = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
PLAIN_LONGROPE = "longrope works with short_factor and long_factor alone."
PLAIN_YARN = (
    "yarn works with factor, original_max_position_embeddings, beta_fast and beta_slow, mscale and mscale_all_dim, a"
    " rotary base above 1, and attention_factor where factor is above 1."
)


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the block that scales positions, complete and without rope_theta; None if nothing is scaled.

    `rope_scaling` replaces `rope_parameters`. A number of original positions outside of the block replaces the one
    inside; without any, it is max_position_embeddings. yarn's factor may be null: the ratio of the two.
    """
    block = _block(config)
    kind = kind_of(config)
    if kind == "default":
        return None
    scaling = {key: value for key, value in block.items() if key != "rope_theta"}
    if kind in _WITH_ORIGINAL:
        if _ORIGINAL in config:
            scaling[_ORIGINAL] = config[_ORIGINAL]
        elif "max_position_embeddings" in config:
            scaling.setdefault(_ORIGINAL, config["max_position_embeddings"])
    if kind == "yarn" and scaling.get("factor", 1) is None and scaling.get(_ORIGINAL):
        scaling["factor"] = config["max_position_embeddings"] / scaling[_ORIGINAL]
    return _in_mscales(scaling) if kind == "yarn" else scaling


def _in_mscales(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return yarn's block with a factor of queries and keys that Transformers and TensorRT-LLM read alike.

    Transformers takes attention_factor, else the ratio of two mscales, else that of 1 and 0. TensorRT-LLM takes the
    ratio of mscale (1 if absent) and mscale_all_dim (0), each 0.1 mscale ln(factor) + 1. Source: TensorRT-LLM 1.2
    `layers/attention.py`, `functional.py` (create_sinusoidal_positions_yarn), `_torch/attention_backend/interface.py`.
    """
    stated, factor = block.get("attention_factor"), block.get("factor")
    scaling = {key: value for key, value in block.items() if key not in _FACTORS}
    if stated is None:
        both = {key: block[key] for key in _FACTORS[1:] if block.get(key)}
        return scaling | (both if len(both) == 2 else {})
    scaling["attention_factor"] = stated
    if isinstance(factor, int | float) and factor > 1:
        scaling["mscale"] = (stated - 1) / (0.1 * math.log(factor))
    return scaling


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the type of scaling; Phi-3's class takes its older names, su and yarn, for longrope."""
    kind = _kind(_block(config))
    return LONGROPE if kind in ("su", "yarn") and config.get("architectures") == [Architecture.PHI3] else kind


def long_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a TensorRT-LLM checkpoint says of longrope; empty for other scalings.

    Source: `models/phi3/config.py` (Phi3Config.from_hugging_face).
    """
    if kind_of(config) != LONGROPE:
        return {}
    scaling = rope_scaling(config) or {}
    return {
        "position_embedding_type": "long_rope",
        _ORIGINAL: scaling[_ORIGINAL],
        "longrope_scaling_short_factors": scaling["short_factor"],
        "longrope_scaling_long_factors": scaling["long_factor"],
        "rotary_scaling": None,
    }


def rope_base(config: Mapping[str, Any]) -> float:
    """Return rope_theta: the block's own, else the one beside it."""
    return float(_block(config).get("rope_theta") or config.get("rope_theta") or DEFAULT_BASE)


def rope_as_read(config: Mapping[str, Any]) -> list[Any]:
    """Return the base and the scaling that follow from a file without standing in it like that; empty if they do.

    They belong into the keys of what is made from such a folder: the files alone do not say how they were read.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or DEFAULT_BASE
    plain = {key: value for key, value in stated.items() if key != "rope_theta"} if _kind(stated) != "default" else None
    config = settled(config)
    rope = [rope_base(config), rope_scaling(config)]
    return [] if _by_layer_type(stated) or rope == [float(base), plain] else rope


def local_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Transformers 4 and 5 for RoPE that differs between windowed layers and the others (Gemma 3).

    Empty for a model with one RoPE. Transformers 4 reads `rope_theta`, `rope_scaling` and `rope_local_base_freq`,
    Transformers 5 one block of `rope_parameters` for each type of layer.
    """
    blocks = config.get("rope_parameters") or {}
    if config.get("architectures") != [Architecture.GEMMA3]:
        return {}
    local = blocks.get("sliding_attention") or {}
    whole = {**(blocks.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    base = whole.get("rope_theta") or config.get("rope_theta") or 1e6
    windowed = local.get("rope_theta") or config.get("rope_local_base_freq") or DEFAULT_BASE
    scaling = rope_scaling({**config, "rope_parameters": None, "rope_scaling": whole})
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_local_base_freq": windowed,
        "rope_parameters": {
            "full_attention": {**(scaling or {"rope_type": "default"}), "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": windowed},
        },
    }


def both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys for RoPE by which Transformers 4 and 5 compute the same."""
    if local := local_rope(config):
        return local
    scaling, base = rope_scaling(config), rope_base(config)
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": base}
    both = {"rope_theta": base, "rope_scaling": scaling, "rope_parameters": parameters}
    if scaling is None or Rotary.of(config).differences or kind_of(config) != LONGROPE:
        return both
    three = {"type": LONGROPE, **{key: scaling[key] for key in _LISTS[LONGROPE]}}  # Phi-3 of 4.57 takes no more
    return both | {"rope_scaling": three, _ORIGINAL: scaling[_ORIGINAL]}


def check_rope(read: ConfigNumbers, config: Mapping[str, Any], head_dim: int, *, by_layer_type: bool) -> None:
    """Note what is incomplete or unknown in the blocks that scale positions.

    With `by_layer_type`, the family has a RoPE of its own for windowed layers.
    """
    blocks, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if not read.fine:
        return
    if _by_layer_type(scaling or {}):
        read.fault(
            "has rope_scaling for each type of layer.", "Transformers reads such blocks as rope_parameters alone."
        )
    elif by_layer_type and scaling and blocks and not _by_layer_type(blocks):
        read.fault("has rope_scaling beside one block of rope_parameters.", "Transformers reads one of the two here.")
    elif isinstance(blocks, Mapping) and _by_layer_type(blocks) and not scaling:
        if not by_layer_type:
            read.fault(
                "has rope_parameters for each type of layer, which Transformers does not read in this family.",
                "It must be one block with rope_type and rope_theta.",
            )
            return
        for name in LAYER_TYPES:
            block = blocks.get(name, {})
            if read.block(f"rope_parameters.{name}", block) and read.fine:
                own = {**config, "rope_parameters": None, "rope_scaling": block}
                _check_block(read, own, f"rope_parameters.{name}", head_dim)
        if read.fine and (kind := _kind(blocks.get("sliding_attention", {}))) != "default":
            read.fault(
                f"has rope_parameters.sliding_attention.rope_type={shown(kind)}.",
                "Windowed layers have 'default': Transformers 4 and TensorRT-LLM scale the others alone.",
            )
    else:
        _check_base(read, config)
        _check_block(read, config, "rope_scaling" if scaling else "rope_parameters", head_dim)


def _check_base(read: ConfigNumbers, config: Mapping[str, Any]) -> None:
    if "rope_theta" not in _block(config) and config.get("rope_theta", 1) is None:
        read.fault("has rope_theta=null.", "It must be a number; leave it out to have the default.")


def _check_block(read: ConfigNumbers, config: Mapping[str, Any], name: str, head_dim: int) -> None:
    block = _block(config)
    kind = kind_of(config)
    if kind not in _NUMBERS:
        read.fault(f"has {name}.rope_type={shown(kind)}.", f"Transformers knows {', '.join(_NUMBERS)}.")
        return
    if kind == "yarn" and "factor" not in block:
        read.fault(f"has a {name} of type 'yarn' without factor.", "It must be a number, or null for the ratio.")
        return
    if _ORIGINAL in config and config[_ORIGINAL] is None and kind in _WITH_ORIGINAL:
        read.fault(f"has {_ORIGINAL}=null.", "It must be a whole number; leave it out to have that of the block.")
        return
    if "rope_theta" in block and block["rope_theta"] is None:
        read.fault(f"has {name}.rope_theta=null.", "It must be a number; leave it out to have that beside the block.")
    scaling = rope_scaling(config) or {}
    for key in _NUMBERS[kind]:
        if scaling.get(key) is None:
            read.fault(f"has a {name} of type '{kind}' without {key}.", "It must be a number.")
    pairs = len(range(0, int(head_dim * _fraction(config)), 2))
    for key in _LISTS.get(kind, ()):
        _check_list(read, scaling.get(key), f"a {name} of type '{kind}' with", key, pairs)
    if kind == "llama3" and read.fine and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        read.fault(
            f"has {name}.high_freq_factor={shown(high)}.", f"It must be above low_freq_factor, which is {shown(low)}."
        )


def _check_list(read: ConfigNumbers, value: object, where: str, key: str, pairs: int) -> None:
    numbers = isinstance(value, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < math.inf for each in value
    )
    if not isinstance(value, list) or not numbers:
        read.fault(f"has {where} {key}={shown(value)}.", "It must be numbers.")
    elif len(value) != pairs:
        allowed = f"It must have {pairs} numbers, one for every two channels that are rotated."
        read.fault(f"has {where} {key} of length {len(value)}.", allowed)


def _by_layer_type(blocks: Mapping[str, Any]) -> bool:
    return bool(blocks) and set(blocks) <= set(LAYER_TYPES)


def _block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    block: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if _by_layer_type(block):
        block = block.get("full_attention") or {}
    return block


def _fraction(config: Mapping[str, Any]) -> float:
    return float(config.get("partial_rotary_factor") or _block(config).get("partial_rotary_factor") or 1.0)


def _kind(block: Mapping[str, Any]) -> str:
    return str(block.get("rope_type", block.get("type", "default")))


def yarn_differences(block: Mapping[str, Any]) -> list[str]:
    """List what makes engines scale by yarn in another way than Transformers does.

    TensorRT-LLM has no factor of queries and keys without one of positions, and takes 4096 for missing original
    positions. Source: `layers/attention.py`, `functional.py` (create_sinusoidal_positions_yarn); Transformers
    `modeling_rope_utils.py`.
    """
    stated = block.get("attention_factor")
    lacks = stated is not None and block.get("mscale") is None
    differences = [f"attention_factor={stated} and factor={block.get('factor')}"] if lacks else []
    if block.get(_ORIGINAL) is None:
        differences.append("no original_max_position_embeddings")
    return differences


@dataclass(frozen=True, slots=True)
class Rotary:
    """Position scaling of a model.

    Attributes:
        kind: type of scaling: "default", "linear", "llama3", "yarn", ...
        fraction: share of each head's channels that is rotated.
        differences: how an engine scales differently from Transformers, in words.
        truncate: whether yarn rounds the ends of its ramp to whole pairs of channels.
        original: positions beyond which longrope has other factors; 0 for other types.
        grows_from: position from which queries grow with it (Ministral 3), which no engine computes; 0 is never.
        reach: positions up to which linear or yarn scale, whatever max_position_embeddings says; 0 for other types.
    """

    kind: str
    fraction: float
    differences: tuple[str, ...] = ()
    truncate: bool = True
    original: int = 0
    grows_from: int = 0
    reach: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face configuration."""
        config = settled(config)
        kind, block = kind_of(config), rope_scaling(config) or {}
        if kind == LONGROPE:
            stated = tuple(f"{key}={block[key]}" for key in _LONGROPE_DIFFERS if block.get(key) is not None)
            return cls(kind, _fraction(config), stated, original=int(block.get(_ORIGINAL) or 0))
        if kind == "linear" and config.get("architectures") != [Architecture.GEMMA3]:  # which states the scaled ones
            positions = config.get("max_position_embeddings") or 0
            return cls(kind, _fraction(config), reach=int(positions * block.get("factor", 0)))
        if kind != "yarn":
            return cls(kind, _fraction(config))
        original = config.get(_ORIGINAL) or _block(config).get(_ORIGINAL) or 0
        reach = int(original * (block.get("factor") or 0))
        growth = int(block.get(_ORIGINAL) or 0) if block.get("llama_4_scaling_beta") else 0
        truncate = bool(block.get("truncate", True))
        return cls(kind, _fraction(config), tuple(yarn_differences(block)), truncate, grows_from=growth, reach=reach)
