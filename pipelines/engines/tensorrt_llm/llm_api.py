"""Options of TensorRT-LLM's LLM API: one table per version, and what a mapping of options breaks.

Source: `llm_api_options/VERSION.json`, which scripts/llm_api_options.py makes of NVIDIA's sources, and `effects.json`,
options that a version accepts and ignores. Nothing of TensorRT-LLM is imported.
"""

import json
import operator
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from pipelines.domain.errors import Fault, did_you_mean
from pipelines.engines.tensorrt_llm.config import OWN_SETTINGS
from pipelines.settings.base import flat

FOLDER = Path(__file__).with_name("llm_api_options")
EFFECTS, TUNED = "effects", "tuned"
"""Files in the folder that are no table."""
RELEASED = 10**6
"""Counts as the number of a release candidate for a version that is none."""
KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "null": (type(None),),
    "map": (dict,),
    "group": (dict,),
}
IN_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "null": "null"}
IN_WORDS |= {"map": "a mapping", "group": "a mapping", "list[any]": "a list of any values"}
BOUNDS = {
    "more_than": ("more than", operator.gt),
    "least": ("at least", operator.ge),
    "less_than": ("less than", operator.lt),
    "most": ("at most", operator.le),
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that is wrong with an option.

    Attributes:
        option: its path: "kv_cache_config.dtype".
        ignored: whether the program accepts the value and ignores it; otherwise it refuses to start.
    """

    option: str
    fault: Fault
    ignored: bool = False


@dataclass(frozen=True, slots=True)
class VersionTable:
    """The options of one version, by path; "group<word>.name" belongs to one kind of a group.

    Attributes:
        options: path -> type, default, choices, bounds, status.
        groups: "group" or "group<word>", empty for the root -> name -> path.
        plain: paths without words.
    """

    version: str
    options: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, str]]
    plain: frozenset[str]

    @classmethod
    def of(cls, version: str, options: Mapping[str, Mapping[str, Any]]) -> Self:
        """Index the options."""
        groups: dict[str, dict[str, str]] = {}
        for path in options:
            group, _, name = path.rpartition(".")
            groups.setdefault(group, {})[name] = path
        return cls(version, options, groups, frozenset(map(_plain, options)))

    def has(self, option: str) -> bool:
        """Return whether any kind of a group has an option."""
        return option in self.plain

    def names(self, group: str, word: str | None) -> dict[str, str]:
        """Return name -> path of the options in a group; of the root if it is empty."""
        return {**self.groups.get(group, {}), **(self.groups.get(f"{group}<{word}>", {}) if word else {})}


def _plain(path: str) -> str:
    return re.sub(r"<.*?>", "", path)


@dataclass(frozen=True, slots=True)
class LlmApiOptions:
    """Options of the LLM API that are no settings, as they are asked for.

    Attributes:
        version: of the TensorRT-LLM that will read them; None if the container's tag does not say it.
        file: content of `llm_api.tuned` and `llm_api.file`, which wins over the former.
        extra: `llm_api.extra`, which wins.
        tuned: `llm_api.tuned`.
    """

    version: str | None = None
    file: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    tuned: str | None = None

    @property
    def others(self) -> dict[str, Any]:
        """Both, without what is a setting here, and without what is never passed on."""
        return without(merged(self.file, self.extra), [*NEVER, *_settings_of(self.file)])


NEVER = ("trust_remote_code", "model", "tokenizer")
"""Options that are never passed on: no code of a model's repository is run, and the checkpoint is what was made."""
_DRAFT_TARGET = ("DraftTarget", "Draft_Target")


def _settings_of(options: Mapping[str, Any]) -> list[str]:
    return [name for name, value in flat(options).items() if name in OWN_SETTINGS and OWN_SETTINGS[name].holds(value)]


def settings_in(extra: Mapping[str, Any]) -> dict[str, str]:
    """Return option -> what to set instead, for options of `llm_api.extra` that are settings here."""
    keys = {name: OWN_SETTINGS[name].key for name in _settings_of(extra)}
    speculative = extra.get("speculative_config")
    if isinstance(speculative, Mapping) and speculative.get("decoding_type") in _DRAFT_TARGET:
        keys["speculative_config"] = "speculative=draft_target"
    return keys | {name: "model" for name in ("model", "tokenizer") if name in extra}


def without(options: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return options without some of them, and without groups that are empty then."""
    result = dict(options)
    for path in paths:
        name, _, inside = path.partition(".")
        if not inside:
            result.pop(name, None)
        elif isinstance(result.get(name), Mapping):
            result[name] = without(result[name], [inside])
            if not result[name]:
                del result[name]
    return result


@dataclass(frozen=True, slots=True)
class TunedFile:
    """One of NVIDIA's files.

    Attributes:
        file: its path in TensorRT-LLM's repository.
        models: names on the Hub that it is for.
        gpu: product it was tuned on; None is any.
        isl: tokens of a prompt; None is any load.
        osl: tokens of an answer.
        concurrency: requests in flight.
        gpus: ranks; None is any number.
    """

    file: str
    commit: str
    models: tuple[str, ...]
    options: Mapping[str, Any]
    gpu: str | None = None
    isl: int | None = None
    osl: int | None = None
    concurrency: int | None = None
    gpus: int | None = None


@cache
def tuned_files() -> dict[str, TunedFile]:
    """Return all files by path."""
    raw = json.loads((FOLDER / f"{TUNED}.json").read_text(encoding="utf-8"))["files"]
    return {each["file"]: TunedFile(**{**each, "models": tuple(each["models"])}) for each in raw}


@cache
def tables() -> tuple[VersionTable, ...]:
    """Return all tables, the oldest version first."""
    raw = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in FOLDER.glob("*.json")
        if path.stem not in (EFFECTS, TUNED)
    ]
    return tuple(
        sorted((VersionTable.of(each["version"], each["options"]) for each in raw), key=lambda t: numbers(t.version))
    )


def numbers(version: str) -> tuple[int, ...]:
    """Return a version for comparisons; a release is newer than its candidates, and "1.4" older than both."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+)(?:rc(\d+))?)?", version)
    if match is None:
        return ()
    major, minor, patch, candidate = match.groups()
    return (int(major), int(minor), *((int(patch), int(candidate or RELEASED)) if patch else ()))


def tables_of(version: str | None) -> tuple[VersionTable, ...]:
    """Return the tables that judge a version: its own, or its neighbours', of which one has to accept an option.

    A patch release gets no options of the next line's candidates: 1.2.2 is judged by 1.2.1 alone.

    Args:
        version: "1.3.0rc20"; None, of a container whose tag does not say it, is judged by all.
    """
    every = tables()
    if version is None:
        return every
    own, names = numbers(version), [numbers(table.version) for table in every]
    at = bisect_right(names, own)
    before, after = every[max(at - 1, 0) : at], every[at : at + 1]
    patched = at > 0 and names[at - 1][3:] == (RELEASED,) and names[at - 1][:2] == own[:2]
    return before if patched or (before and before[0].version == version) else (*before, *after)


OLD_DRAFTS = ("1.2.1", "1.3.0rc3")
"""Tables of versions that run a draft model in an engine of its own (before pull request #11758), and answer greedily
where the target model drafts inside itself, unless `allow_advanced_sampling` is set (before #14745)."""


def sampling_option(version: str | None) -> dict[str, bool]:
    """Return what a `speculative_config` needs for requests to sample; newer versions see it from the request."""
    return {"allow_advanced_sampling": True} if tables_of(version)[0].version in OLD_DRAFTS else {}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings in one, groups merged; `more` wins."""
    result = dict(base)
    for name, value in more.items():
        inside = result.get(name)
        both = isinstance(inside, Mapping) and isinstance(value, Mapping)
        result[name] = merged(inside, value) if both else value  # type: ignore[arg-type]
    return result


def complaints(options: Mapping[str, Any], version: str | None, source: str) -> list[Complaint]:
    """Return everything that a version of TensorRT-LLM would refuse or ignore, in the order of the options.

    Args:
        options: as `trtllm-serve --extra_llm_api_options` reads them.
        version: of TensorRT-LLM; see `tables_of`.
        source: what messages name before an option: "llm_api.extra.", "qwen3.yaml: ".
    """
    if not options:
        return []
    judges = tables_of(version)
    title = f"TensorRT-LLM {version or ' or '.join(table.version for table in judges)}"
    verdicts = [{each.option: each for each in _Judge(table, source, title).judge(options)} for table in judges]
    wrong = [each for option, each in verdicts[-1].items() if all(option in verdict for verdict in verdicts)]
    return wrong + _contradictions(options, source) + _ignored(options, judges, source, title)


def doubts(options: Mapping[str, Any], version: str | None) -> list[tuple[str, bool, list[str]]]:
    """Return what only one of several judging versions refuses or ignores, so that nobody knows what this one does.

    Returns:
        (version, whether it ignores them or else refuses them, options) of each table.
    """
    judges, sure, disputed = tables_of(version), {each.option for each in complaints(options, version, "")}, []
    for table in judges if len(judges) > 1 else ():
        own = [each for each in complaints(options, table.version, "") if each.option not in sure]
        for ignored in (False, True):
            if names := [each.option for each in own if each.ignored is ignored]:
                disputed.append((table.version, ignored, names))
    return disputed


@dataclass(frozen=True, slots=True)
class _Judge:
    """One table, and the words of its messages: what names the options, and the version."""

    table: VersionTable
    source: str
    title: str

    def judge(
        self, options: Mapping[str, Any], prefix: str = "", group: str = "", word: str | None = None
    ) -> Iterator[Complaint]:
        """Judge names, types, choices and bounds in one group: as it is shown, and as the table calls it."""
        names = self.table.names(group, word)
        for name, value in options.items():
            path = f"{prefix}{name}"
            if name not in names:
                if not _effects(path, (self.table,)):
                    yield Complaint(path, self._unknown(path, str(name), names, word))
                continue
            row = self.table.options[names[name]]
            if fault := _wrong_value(row, value, f"{self.source}{path}"):
                yield Complaint(path, fault)
            elif "group" in row["type"] and isinstance(value, dict):
                yield from self._judge_group(row, value, path, names[name])
        for name, option in names.items():
            if prefix and self.table.options[option].get("required") and name not in options:
                yield Complaint(f"{prefix}{name}", Fault(f"{self.source}{prefix}{name} must be given."))

    def _judge_group(self, row: Mapping[str, Any], value: dict[str, Any], path: str, group: str) -> Iterator[Complaint]:
        if "by" not in row:
            yield from self.judge(value, f"{path}.", group)
            return
        by, choices = row["by"], row["choices"]
        word = value.get(by)
        if word not in choices:
            key = f"{self.source}{path}.{by}"
            what = f"{key} must be given." if word is None else f"{key}={_shown(word)} is unknown to {self.title}."
            hint = did_you_mean(str(word), choices) if word else ""
            yield Complaint(f"{path}.{by}", Fault(what, f"Choose one of {', '.join(choices)}.", hint))
            return
        yield from self.judge({name: own for name, own in value.items() if name != by}, f"{path}.", group, word)

    def _unknown(self, path: str, name: str, names: Mapping[str, str], word: str | None) -> Fault:
        """Say where a name is known instead: another version, another place, or the nearest name."""
        what = f"{self.source}{path} is unknown to {self.title}"
        others = [other.version for other in tables() if other is not self.table and other.has(path)]
        if self.table.has(path) and word is not None:
            return Fault(f"{self.source}{path} does not belong to {word}.", f"{word} has {', '.join(names)}.")
        if others:
            todo = f"Leave it out, or give the container of TensorRT-LLM {others[-1]} as image.base_llm_api."
            have = f"{', '.join(others[:-1])} and {others[-1]} have" if others[1:] else f"{others[0]} has"
            return Fault(f"{what}: {have} it.", todo=todo)
        if name in _facts()["renamed"]:
            return Fault(f"{what}.", todo=f"It is now {_facts()['renamed'][name]}.")
        places = [each for each in sorted(self.table.plain) if each.rpartition(".")[2] == name]
        hint = f"Did you mean {', '.join(places[:3])}?" if places else did_you_mean(name, names)
        return Fault(f"{what}.", todo=hint)


def _wrong_value(row: Mapping[str, Any], value: Any, key: str) -> Fault | None:
    """Return what is wrong with a value, without looking into groups."""
    kinds = re.split(r"\|(?![^\[]*\])", row["type"])
    if "any" not in kinds and not any(_is(kind, value) for kind in kinds):
        either = (", or " if "list[" in row["type"] else " or ").join(map(_kind, kinds))
        return Fault(f"{key}={_shown(value)} is not valid: it should be {either}.")
    if value == [] and row.get("filled"):
        return Fault(f"{key}=[] is not valid: it must not be empty.")
    values = value if isinstance(value, list) else [value]
    texts = [each for each in values if isinstance(each, str)]
    if "choices" in row and "by" not in row:
        lower = key.endswith("load_format") or key.endswith("cp_type")  # read in any case
        choices = [str(each) for each in row["choices"]]
        accepted = {each.lower() for each in choices} if lower else set(choices)
        for text in texts:
            if (text.lower() if lower else text) not in accepted:
                allowed = f"Choose one of {', '.join(choices)}."
                return Fault(f"{key}='{text}' is not known.", allowed, did_you_mean(text, choices))
    for name, (relation, holds) in BOUNDS.items():
        for each in values:
            number = isinstance(each, int | float) and not isinstance(each, bool)
            if name in row and number and not holds(each, row[name]):
                return Fault(f"{key}={_shown(value)} is out of range: it must be {relation} {row[name]}.")
    return None


def _is(kind: str, value: Any) -> bool:
    if inner := re.fullmatch(r"list\[(.*)\]", kind):
        return isinstance(value, list) and all(any(_is(one, each) for one in inner[1].split("|")) for each in value)
    if isinstance(value, bool):
        return kind in ("bool", "any")
    return kind == "any" or isinstance(value, KINDS[kind])


def _kind(kind: str) -> str:
    return IN_WORDS[kind] if kind in IN_WORDS else f"a list, each {_kind(kind[5:-1])}"


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)


_WITH_A_DRAFT = ("Eagle", "Eagle3", *_DRAFT_TARGET)


def _contradictions(options: Mapping[str, Any], source: str) -> list[Complaint]:
    values, wrong = flat(options), list[Complaint]()
    sizes, most = values.get("cuda_graph_config.batch_sizes"), values.get("cuda_graph_config.max_batch_size")
    if isinstance(sizes, list) and sizes and isinstance(most, int) and most and most != max(sizes):
        what = (
            f"{source}cuda_graph_config.max_batch_size={most} contradicts batch_sizes, whose largest is {max(sizes)}."
        )
        wrong.append(Complaint("cuda_graph_config.max_batch_size", Fault(what, todo="Give one of the two.")))
    if values.get("speculative_config.max_concurrency") and values.get("speculative_config.draft_len_schedule"):
        what = f"{source}speculative_config has both max_concurrency and draft_len_schedule, which exclude each other."
        wrong.append(Complaint("speculative_config.draft_len_schedule", Fault(what, todo="Remove one.")))
    if values.get("kv_cache_config.disk_cache_size") and not values.get("kv_cache_config.disk_cache_path"):
        what = f"{source}kv_cache_config.disk_cache_size needs kv_cache_config.disk_cache_path."
        wrong.append(Complaint("kv_cache_config.disk_cache_path", Fault(what)))
    return wrong + _unmet(options, values, source)


def _unmet(options: Mapping[str, Any], values: Mapping[str, Any], source: str) -> list[Complaint]:
    """Return what an option needs beside it. Source: validators of TorchLlmArgs and SADecodingConfig."""
    wrong, kind = list[Complaint](), values.get("speculative_config.decoding_type")
    drafts = [values.get(f"speculative_config.speculative_model{end}") for end in ("", "_dir")]
    if kind in _WITH_A_DRAFT and drafts == [None, None]:
        what = f"{source}speculative_config.decoding_type='{kind}' needs speculative_model, the draft model."
        wrong.append(Complaint("speculative_config.speculative_model", Fault(what)))
    if kind == "SA" and values.get("speculative_config.max_matching_ngram_size") == 0:
        what = f"{source}speculative_config.max_matching_ngram_size=0 is not valid for SA."
        fault = Fault(what, "It must be above 0, or -1 for the longest match.")
        wrong.append(Complaint("speculative_config.max_matching_ngram_size", fault))
    for name in ("ray_worker_extension_cls", "ray_placement_config"):
        if options.get(name) is not None and options.get("orchestrator_type") != "ray":
            wrong.append(Complaint(name, Fault(f"{source}{name} needs orchestrator_type='ray'.")))
    return wrong


def split_fault(options: Mapping[str, Any], tp_size: int, source: str) -> list[Complaint]:
    """Judge the split of the experts: tensor, expert and cluster parallel sizes multiply to the ranks of a stage."""
    names = ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size")
    parts = {name: value for name in names if isinstance(value := options.get(name), int) and value > 0}
    product, whole = 1, {*names[:2]} <= parts.keys()
    for value in parts.values():
        product *= value
    if not parts or (product == tp_size if whole else tp_size % product == 0):
        return []
    sizes = " x ".join(f"{name}={value}" for name, value in parts.items())
    fits = "must be" if whole else "must divide"
    what = f"{source}{sizes} {fits} tensor_parallel_size={tp_size}."
    return [
        Complaint(next(iter(parts)), Fault(what, todo=f"Set build.tp_size={product}, or change {', '.join(parts)}."))
    ]


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FOLDER / f"{EFFECTS}.json").read_text(encoding="utf-8"))
    return facts


def _effects(option: str, judges: tuple[VersionTable, ...]) -> list[Mapping[str, Any]]:
    return [
        each
        for each in _facts()["ignored"]
        if re.fullmatch(each["option"], option) and {table.version for table in judges} <= {*each["versions"]}
    ]


def _ignored(options: Mapping[str, Any], judges: tuple[VersionTable, ...], source: str, title: str) -> list[Complaint]:
    values, ignored = flat(options), list[Complaint]()
    for option, value in values.items():
        for each in _effects(option, judges):
            if value is None or ("value" in each and each["value"] != value):
                continue
            if "unless" in each and values.get(each["unless"]) is True:
                continue
            what = f"{source}{option}={_shown(value)} has no effect in {title}: {each['because']}."
            ignored.append(Complaint(option, Fault(what, todo="Remove it."), ignored=True))
    return ignored
