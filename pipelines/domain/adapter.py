"""A LoRA adapter, as its files describe it, and as peft reads its adapter_config.json."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.domain.errors import Fault, UserError, refuse, shown
from pipelines.domain.model_shape import ModelShape

MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
}
"""Hugging Face's name of a linear -> TensorRT-LLM's name of the LoRA module. Source: `tensorrt_llm/lora_manager.py`."""

READ, ANY = "read here", "any value"
OFF: tuple[object, ...] = (None, False)
NONE: tuple[object, ...] = (None, [], {})
FIELDS: dict[str, str | tuple[object, ...]] = {
    "task_type": (None, "CAUSAL_LM"),
    "peft_type": ("LORA",),
    "auto_mapping": ANY,
    "peft_version": ANY,
    "base_model_name_or_path": ANY,  # the sizes of the matrices are compared with the model instead
    "revision": ANY,
    "inference_mode": ANY,
    "r": READ,
    "target_modules": READ,
    "exclude_modules": READ,
    "lora_alpha": READ,
    "lora_dropout": ANY,
    "fan_in_fan_out": OFF,  # peft writes false for every linear, whatever was set
    "bias": ("none",),
    "use_rslora": (*OFF, True),
    "modules_to_save": NONE,
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),  # others change the model
    "layers_to_transform": READ,
    "layers_pattern": (None, "", [], "layers", ["layers"]),
    "rank_pattern": READ,
    "alpha_pattern": READ,
    "megatron_config": NONE,
    "megatron_core": ANY,  # read with megatron_config alone
    "trainable_token_indices": NONE,
    "loftq_config": ANY,  # this and the next three are read with their init_lora_weights alone
    "eva_config": ANY,
    "corda_config": ANY,
    "lora_ga_config": ANY,
    "use_dora": OFF,
    "velora_config": (None,),  # changes the backward pass alone, but its buffers stand among the weights
    "alora_invocation_tokens": NONE,
    "use_qalora": OFF,
    "qalora_group_size": ANY,  # read with use_qalora alone
    "monteclora_config": (None,),
    "layer_replication": NONE,
    "runtime_config": ANY,  # where to compute; peft does not save it
    "lora_bias": OFF,
    "target_parameters": NONE,
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "ensure_weight_tying": ANY,  # of embeddings, which cannot be adapted
}
"""Every field of peft's LoraConfig -> the values with which an adapter is y = W x + scaling * B (A x) and no more."""

MERGE = "Train a plain LoRA adapter, or merge this one into the model with peft's merge_and_unload()."
TODO = {
    "peft_type": "Give a LoRA adapter. The rows of a prompt tuning go with each request: "
    "build.max_prompt_embedding_table_size.",
    "init_lora_weights": "It changes the model's own weights: save it again with"
    " save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes a plain adapter of it.",
    "alora_invocation_tokens": "Train it without: it acts on the tokens after an invocation, which no engine can do.",
}
PEFTS_DEFAULT = {"r": 8, "lora_alpha": 8}
PEFTS_TARGETS = ["q_proj", "v_proj"]
"""What peft takes in these families without target_modules (`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter for a base model.

    Attributes:
        modules: Hugging Face names of the linears it changes, e.g. ("q_proj", "v_proj").
        widths: (inputs, outputs) of each module, from its tensors; the module's name ends in that of the linear.
        layers: of the model, at least: one more than the highest that it changes.
    """

    place: str
    rank: int
    modules: tuple[str, ...]
    widths: dict[str, tuple[int, int]]
    layers: int = 1

    @property
    def wide_bytes(self) -> int:
        """Bytes of all matrices in float32, if each has the rank of the largest."""
        return 4 * self.rank * sum(map(sum, self.widths.values()))

    @property
    def trtllm_modules(self) -> tuple[str, ...]:
        """The linears under TensorRT-LLM's names."""
        return tuple(MODULES[name] for name in self.modules)


def linear_widths(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear of one layer, by Hugging Face name."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Refuse what changes more than two matrices of a linear; of another kind of adapter, the kind alone.

    Raises:
        UserError: every such key of adapter_config.json.
    """
    stated = {"peft_type": config.get("peft_type"), **config}
    faults = []
    for key, value in stated.items():
        allowed = FIELDS.get(key, (*OFF, [], {}, ""))
        if not isinstance(allowed, str) and value not in allowed:
            unknown = "" if key in FIELDS else ", a key that is not known here and may change what the adapter computes"
            values = ", ".join(json.dumps(each) for each in allowed) + ("" if key in FIELDS else ", or no such key")
            faults.append(
                Fault(
                    f"{source} has {_bare(key)}={shown(value)}{unknown}.", f"Allowed: {values}.", TODO.get(key, MERGE)
                )
            )
        if faults and key == "peft_type":
            break
    refuse(faults)


def scalings(config: Mapping[str, Any], source: str, ranks: Mapping[str, int]) -> dict[str, float]:
    """Return the factor of B (A x) of each module: alpha / rank, or alpha / sqrt(rank) if stabilized.

    Args:
        config: content of adapter_config.json, after `check_config`; peft's defaults stand for what is absent.
        source: path of that file, for messages.
        ranks: module, e.g. "model.layers.0.self_attn.q_proj" -> rows of its A.

    Raises:
        UserError: a value is none that peft takes, or contradicts `ranks`.
    """
    rank_of = _by_module(config, source, ("r", "rank_pattern"), _whole, len(ranks))
    alpha_of = _by_module(config, source, ("lora_alpha", "alpha_pattern"), _finite, len(ranks))
    _check_targets(config, source, ranks)
    for module, rows in ranks.items():
        key, stated = rank_of(module)
        if stated != rows:
            raise UserError(
                f"{source} has {key}={stated:g}, but A of {module} has {rows} rows.",
                allowed="A has as many rows as r, or as the first pattern of rank_pattern that matches.",
                todo="Save the adapter again with peft's save_pretrained().",
            )
    power = 0.5 if config.get("use_rslora") else 1
    return {module: alpha_of(module)[1] / rank**power for module, rank in ranks.items()}


def _bare(name: str) -> str:
    return shown(name).strip("'")


def _whole(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**31


ALLOWED: dict[Callable[[object], bool], str] = {
    _whole: "It must be a whole number of at least 1.",
    _finite: "It must be a number.",
}


def _by_module(
    config: Mapping[str, Any], source: str, keys: tuple[str, str], fits: Callable[[object], bool], modules: int
) -> Callable[[str], tuple[str, float]]:
    """Return a function: module -> (value, key that states it), from the first matching pattern, or the default."""
    plain, patterned = keys
    default, patterns = config.get(plain, PEFTS_DEFAULT[plain]), config.get(patterned, {})
    if not isinstance(patterns, Mapping):
        raise UserError(f"{source} has {patterned}={shown(patterns)}.", allowed="It must be an object of patterns.")
    for key, value in ((plain, default), *((f"{patterned}.{shown(name)}", value) for name, value in patterns.items())):
        if not fits(value):
            raise UserError(f"{source} has {key}={shown(value)}.", allowed=ALLOWED[fits], todo="Correct the file.")
    check_effort(patterns, f"{source}: {patterned}", modules, repeats=1)  # the (.*\.)? of `_compiled`
    compiled = [(name, _compiled(name, f"{source} has {patterned}"), value) for name, value in patterns.items()]

    def find(module: str) -> tuple[str, float]:
        for name, pattern, value in compiled:
            if pattern.match(module):
                return f"{patterned}.{shown(name)}", value
        return plain, default

    return find


def _compiled(pattern: str, where: str, form: str = r"(.*\.)?({})$") -> re.Pattern[str]:
    """Return a pattern as peft 0.21 applies it (`peft/utils/other.py`, get_pattern_key)."""
    try:
        return re.compile(form.replace("{}", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{where} with the pattern {shown(pattern)}: {error}.",
            allowed="Patterns are the names of modules or regular expressions.",
            todo="Correct the pattern.",
        ) from None


LONGEST_NAME, LONGEST_PATTERN = 64, 1000
COMPILING, MOST_STEPS = 10**5, 2 * 10**9
"""Compiling a pattern costs as much as this many steps of `_ways`; all patterns of an adapter may cost seconds."""
_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[:=!]|<[=!]|P<\w+>))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\}|\{,\d*\})[?+]?)|\\.|\[\^?\]?(?:\\.|[^\]\\\[])*\]|(?P<odd>\[)|.",
    re.DOTALL,
)


_WORDS = re.compile(r"(?<!\\)\((?:\?:)?((?:\w+\|){0,15}\w+)\)(?![*+?{])")
"""A group of few words: of more, each costs time."""


def check_effort(patterns: Mapping[str, Any], where: str, modules: int, repeats: int = 0) -> None:
    """Refuse patterns of strangers that could match for ever: Python's `re` tries all ways, and cannot be interrupted.

    Raises:
        UserError: a group with a choice in it repeats, or too many choices follow one another.
    """
    total = 0.0
    for pattern in patterns:
        ways = math.inf if len(pattern) > LONGEST_PATTERN else _ways(_WORDS.sub(_choices, pattern), repeats)
        total += COMPILING + modules * ways
        if total > MOST_STEPS:
            raise UserError(
                f"{where} has {len(patterns)} patterns, and {shown(pattern)} could take too long to match.",
                allowed=f"Patterns of up to {LONGEST_PATTERN} characters with few repetitions, none inside a repeated"
                " group, and no flags.",
                todo="Write the names of the modules instead.",
            )


def _choices(group: re.Match[str]) -> str:
    """Return a group of words with those alone that can fit at one place: each begins the longest of them."""
    words = group[1].split("|")
    return f"({'|'.join('x' * max(sum(map(word.startswith, words)) for word in words))})"


def _ways(pattern: str, before: int) -> float:
    """Return a bound on the steps of matching a name; infinite if a repeated group holds a choice, or it has flags.

    Alternatives of the whole pattern add up, each after `before` repetitions; those of a group multiply.
    """
    total, ways, repeats, closed = 0.0, 1.0, before, False
    groups: list[list[int]] = [[1, 0]]  # of each open group: its alternatives, and whether there is a choice in it
    for token in _TOKEN.finditer(f"{pattern}|"):
        kind, text = token.lastgroup, token[0]
        begins = pattern[: token.start()][-1:] in ("", "(")
        if kind == "odd" or (kind == "repeat" and begins) or (kind == "close" and len(groups) == 1):
            return math.inf
        if kind == "open":
            groups.append([1, 0])
        elif kind == "bar" and len(groups) == 1:
            total += ways * LONGEST_NAME**repeats / math.factorial(repeats) if repeats < 20 else math.inf
            ways, repeats = 1.0, before
        elif kind == "bar":
            groups[-1] = [groups[-1][0] + 1, 1]
        elif kind == "repeat":
            if closed and text[0] != "?":
                return math.inf
            groups[-1][1] = 1
            ways, repeats = (2 * ways, repeats) if text[0] == "?" else (ways, repeats + 1)
        closed = False
        if kind == "close":
            alternatives, closed_choice = groups.pop()
            ways, closed = ways * alternatives, bool(closed_choice)
            groups[-1][1] |= closed_choice
    return total


def _check_targets(config: Mapping[str, Any], source: str, modules: Mapping[str, int]) -> None:
    """Check that peft would load every matrix; it ignores those of modules that the lists leave out.

    A text in place of a list is a regular expression that matches a module's whole name.
    """
    for key, adapted in (("target_modules", True), ("exclude_modules", False)):
        names = config.get(key)
        if adapted and names is None:
            names = PEFTS_TARGETS
        if (not adapted and not names) or (isinstance(names, str) and names.lower() == "all-linear"):
            continue
        fits = _chosen(names, f"{source} has {key}", len(modules))
        for module in modules:
            if fits(module) is not adapted:
                raise _left_out(source, key, names, module)
    layers = config.get("layers_to_transform")
    if layers is None and config.get("layers_pattern"):
        pattern = shown(config["layers_pattern"])
        raise UserError(f"{source} has layers_pattern={pattern}, but no layers_to_transform.", todo="Correct the file.")
    chosen = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(chosen, list) or not all(type(number) is int for number in chosen):
        raise UserError(f"{source} has layers_to_transform={shown(layers)}.", allowed="It must be a list of numbers.")
    named = config.get("target_modules") or ()  # a module named in full is taken in any layer
    for module in modules if chosen else ():
        if module not in named and int(module.partition("layers.")[2].partition(".")[0]) not in chosen:
            raise _left_out(source, "layers_to_transform", layers, module)


def _chosen(names: Any, where: str, modules: int) -> Callable[[str], bool]:
    """Return whether peft takes a module for one of these names, or for this regular expression."""
    if isinstance(names, str):
        check_effort({names: None}, where, modules)
        pattern = _compiled(names, where, "{}")
        return lambda module: pattern.fullmatch(module) is not None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}={shown(names)}.", allowed="It must be a list of names, or a regular expression.")
    ends = tuple(f".{name}" for name in names)
    return lambda module: f".{module}".endswith(ends)


def _left_out(source: str, key: str, value: object, module: str) -> UserError:
    return UserError(
        f"{source} has {key}={shown(value)}, which leaves out {module}, but the adapter has matrices for it.",
        allowed="peft loads only matrices of chosen modules.",
        todo=f"Correct {key}, or save the adapter again with peft's save_pretrained().",
    )
