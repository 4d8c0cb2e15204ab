"""Turn the words of a TensorRT-LLM 1.2 deployment into those of the LLM API."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from pipelines.deploy.migrate.sources import TEMPLATE, WORDS, OldDeployment, OldSetting
from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.formats import BY_QUANT_ALGO, KvFormat, QFormat, stored_as
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.limits import SIZES
from pipelines.engines.tensorrt_llm.config import OPTIONS, BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import complaints
from pipelines.rules.record import DeploymentFacts, alternatives
from pipelines.rules.rulebook import RULES, check, refused

State = Literal["kept", "renamed", "lost", "needless", "ignored", "unknown", ""]
MODEL = "the model"
DRAFTS = "draft_tokens_external"
OFF: tuple[Any, ...] = (None, False, "", "disable", 0, [])


@dataclass(frozen=True, slots=True)
class Word:
    """Translation of one setting.

    Attributes:
        state: "ignored" has no effect today either; "unknown" is not in the table; empty says nothing.
        old: "name=value".
        to: its name in the LLM API, with dots; empty if there is none.
        value: its value there.
        instead: what to take for something lost.
    """

    state: State
    old: str = ""
    place: str = ""
    to: str = ""
    value: Any = None
    why: str = ""
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Formats:
    """The formats of an engine, and what the LLM API runs.

    Attributes:
        words: what becomes of them, and of the model.
        quant: our name of the format of the weights; None if it is not stated or not one of ours.
        kv_cache: likewise of the KV cache.
        instead: of "quant" and "kv_cache" what is lost -> the formats that run.
    """

    words: tuple[Word, ...]
    quant: QFormat | None = None
    kv_cache: KvFormat | None = None
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shape: ModelShape | None = None


def translate(old: OldDeployment, formats: Formats, version: str | None, draft: Mapping[str, Any]) -> list[Word]:
    """Return what becomes of every setting that says something.

    Args:
        old: the deployment.
        formats: as judged.
        version: of the TensorRT-LLM that will read the options; None is any.
        draft: the LLM API's `speculative_config` of the draft model, which an engine does not name, if it is named.
    """
    stated = {(each.table, each.name): each for each in old.settings}
    words = [*formats.words, *_split(old), *map(_word, stated.values()), *_speculation(old, draft)]
    served = stated.get(("triton", "triton_max_batch_size"))
    if served and served.value.isdigit() and ("build", "max_batch_size") not in stated:
        why, size = "of Triton's model, as the engine's own is not stated", int(served.value)
        words.append(Word("renamed", f"max_batch_size={size}", served.place, "max_batch_size", size, why))
    wrong = {each.option: each.fault.text for each in complaints(arguments(words), version, "")}
    words = [replace(word, state="lost", to="", why=wrong[word.to]) if word.to in wrong else word for word in words]
    return [word for word in words if word.state]


def arguments(words: Sequence[Word]) -> dict[str, Any]:
    """Return the arguments of the LLM API, nested as in its YAML file."""
    nested: dict[str, Any] = {}
    for word in words:
        *groups, last = word.to.split(".")
        if last.islower():  # the others are none, or variables of the environment
            reduce(lambda inner, group: inner.setdefault(group, {}), groups, nested)[last] = word.value
    return nested


def _split(old: OldDeployment) -> Iterator[Word]:
    unstated = old.world_size, "gpu_device_ids, as the engine's own split is not stated"
    for name, (size, place) in (old.sizes or {"tp_size": unstated}).items():
        if size > 1:
            yield Word("renamed", f"{name}={size}", place, WORDS["sizes"][name], size)


def _word(each: OldSetting) -> Word:
    row, old, place = WORDS[each.table].get(each.name) or WORDS["earlier"].get(each.name), each.name, each.place
    old = f"{each.name}={text(each.value)}"
    if row is None and each.table == "triton":
        near = did_you_mean(each.name, WORDS["triton"])
        return Word("ignored", old, place, why=f"TensorRT-LLM's backend has no such parameter. {near}".strip())
    if row is None:
        return Word("" if each.value in OFF else "unknown", old, place, why="the table of words does not have it")
    if not _says_something(each, row) or row.get("needless") == "decided":
        return Word("")
    if "to" not in row:
        why = row.get("lost") or WORDS["reasons"][row["needless"]]
        return Word("lost" if "lost" in row else "needless", old, place, why=why, instead=row.get("instead", ""))
    kind, value = row.get("as"), each.value
    try:
        value = kind[str(value).lower()] if isinstance(kind, dict) else KINDS[kind](value) if kind in KINDS else value
    except (KeyError, ValueError):
        return Word("ignored", old, place, why="TensorRT-LLM's backend cannot read the value")
    return Word("kept" if row["to"] == each.name else "renamed", old, place, row["to"], value)


KINDS: dict[Any, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "ints": lambda value: [int(part) for part in value.split(",")],
}


def text(value: Any) -> str:
    """Return a value as people write it: "true", "1,2"."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _says_something(each: OldSetting, row: Mapping[str, Any]) -> bool:
    """Return whether a setting differs from TensorRT-LLM's default; an engine's limits always do, except beams."""
    table, value = TEMPLATE["tensorrt_llm"] if each.table == "triton" else {}, each.value
    usual = OPTIONS[each.name].default if each.name in OPTIONS else table.get(each.name, row).get("default")
    if each.table == "build" and each.name in SIZES[:-1]:
        return value is not None
    if each.table == "triton" or (each.given and "to" in row):
        return value not in OFF and text(value).lower() != text(usual).lower() and (each.given or "to" in row)
    if isinstance(value, bool) and usual in ("enable", "disable"):
        value = "enable" if value else "disable"
    unused = value in OFF and (usual in OFF or "needless" in row)
    return not unused and text(value).lower() != text(usual).lower()


def _speculation(old: OldDeployment, draft: Mapping[str, Any]) -> Iterator[Word]:
    values = {each.name: each for each in old.settings if each.value not in OFF}
    mode = values.get("speculative_decoding_mode") or values.get("decoding_mode")
    if mode and draft and mode.value == DRAFTS:
        built = {"max_draft_len": values["max_draft_len"].value} if "max_draft_len" in values else {}
        for name, value in {**draft, **built}.items():
            yield Word("renamed", f"{mode.name}={mode.value}", mode.place, f"speculative_config.{name}", value)
    elif mode and (row := WORDS["speculation"].get(mode.value)):
        state: State = "lost" if "lost" in row else "renamed"
        why = row.get("lost") or row["why"]
        yield Word(state, f"{mode.name}={mode.value}", mode.place, why=why, instead=row.get("instead", ""))


def judge(old: OldDeployment, sm: float | None) -> Formats:
    """Judge formats and model by the rules of the LLM API.

    Args:
        old: the deployment.
        sm: compute capability of the GPU; None judges without one.
    """
    place, shape = ", ".join(old.read), _shape(old)
    if old.algorithms is None:
        why = "it is quant_algo in the checkpoint's config.json, and not in what was read"
        return Formats((Word("unknown", "format of the weights", place, why=why),), shape=shape)
    algo, kv_algo = old.algorithms
    row = WORDS["weights"].get(algo or "", {})
    scales = not old.pretrained or bool((old.pretrained.get("quantization") or {}).get("pre_quant_scale"))
    quant = QFormat(row["as"]) if "as" in row else stored_as(algo, scales) if algo in BY_QUANT_ALGO else None
    kv_cache = {None: KvFormat.AUTO, "FP8": KvFormat.FP8, "INT8": KvFormat.INT8}.get(kv_algo)
    tp, pp = (old.sizes.get(name, (1, ""))[0] for name in ("tp_size", "pp_size"))
    facts = DeploymentFacts(
        writes_engine=False, shape=shape, qformat=quant or QFormat.NONE, kv_format=kv_cache or KvFormat.AUTO, sm=sm,
        build=BuildSettings(tp_size=tp, pp_size=pp), label=old.model or MODEL,
    )  # fmt: skip
    reason = row.get("why") or f"a Hugging Face checkpoint in this format: quant={quant}"
    reason += "" if algo or old.pretrained else "; unless the model was quantized before it was converted"
    words = {"quant": Word("kept", f"quant_algo={algo or 'none (16 bit)'}", place, why=reason)}
    if kv_algo:
        words["kv_cache"] = Word("unknown", f"kv_cache_quant_algo={kv_algo}", place, why="the table does not have it")
    if kv_cache is KvFormat.FP8:
        words["kv_cache"] = Word("renamed", words["kv_cache"].old, place, "kv_cache_config.dtype", "fp8")
    others = {each.group: each for each in alternatives(RULES, facts)}
    for broken in check(facts):
        if refused([broken]):  # every format of either is refused for what the model is
            about = next((group for group, each in others.items() if broken.rule.name not in each.whatever), MODEL)
            what = words[about].old if about in words else about
            words[about] = Word("lost", what, place, why=broken.fault.message, instead=broken.fault.allowed)
    if quant is None and "why" not in row:
        why = row.get("lost", "the table of formats does not have it")
        words["quant"] = Word("lost" if "lost" in row else "unknown", words["quant"].old, place, why=why)
    runs: dict[str, tuple[str, ...]] = {
        group: tuple(str(choice) for choice, names in each.refusals.items() if names <= each.whatever)
        for group, each in others.items()
        if group in words and words[group].state == "lost"
    }
    return Formats(tuple(words.values()), quant, kv_cache, runs, shape)


def _shape(old: OldDeployment) -> ModelShape | None:
    """Return the model's shape; None for an architecture that is not known here, or without a checkpoint's sizes."""
    config = {"head_dim": old.pretrained.get("head_size"), **old.pretrained}
    try:
        return ModelShape.from_hf_config(config | {"architectures": [config.get("architecture")]}, buildable=False)
    except UserError:
        return None
