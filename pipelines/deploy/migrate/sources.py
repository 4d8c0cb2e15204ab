"""Read a TensorRT-LLM 1.2 deployment: an engine's config.json, a Triton repository, or the commands of a script."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import triton_repo
from pipelines.domain.errors import Fault, UserError, did_you_mean, refuse, shown
from pipelines.engines.limits import CONFIG, read_engine_config
from pipelines.engines.tensorrt_llm.config import FLAG, LIST, OPTIONS
from pipelines.engines.tensorrt_llm.folder import PROGRAM
from pipelines.store.manifest import MANIFEST, read_manifest
from triton_repo.tensors import DRAFT, PREPROCESSING

WORDS: Mapping[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""What becomes of each word, see `about` in the file."""
TEMPLATE = json.loads(Path(triton_repo.__file__).with_name("template_params.json").read_text(encoding="utf-8"))
MODES = (None, "draft_tokens_external", "medusa", "lookahead_decoding", "explicit_draft_tokens", "eagle")
"""Kinds of speculative decoding; config.json has the bit of each. Source: `modeling_utils.py`."""
BY_COMMAND = "Give the command that built the engine: make migrate 'migrate.command=trtllm-build ...'"
LARGEST_SCRIPT, MOST_GPUS = 2**20, 1024
ONE = "Migrate one of them alone, or correct the wrong one."


@dataclass(frozen=True, slots=True)
class OldSetting:
    """One setting of the old deployment.

    Attributes:
        table: "build" or "triton", the part of `WORDS` that knows it.
        name: without dashes.
        value: as in JSON, or text.
        given: whether somebody wrote it, and not a program.
    """

    table: str
    name: str
    value: Any
    place: str
    given: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OldDeployment:
    """Facts of a deployment from one or several sources.

    Attributes:
        settings: in the order of the sources.
        version: of TensorRT-LLM; empty if none is stated.
        pretrained: the checkpoint's configuration; empty if none was read.
        algorithms: quant_algo and kv_cache_quant_algo, of which None is 16 bit; None if they are not stated.
        sizes: size of a split -> (ranks, where it stands).
        groups: GPUs of each instance of the model, in rank order.
        model: Hugging Face folder or name; empty if none is named.
    """

    read: tuple[str, ...] = ()
    settings: tuple[OldSetting, ...] = ()
    version: str = ""
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    algorithms: tuple[str | None, str | None] | None = None
    sizes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    model: str = ""

    def merged(self, other: "OldDeployment") -> "OldDeployment":
        """Merge two; values of this one win.

        Raises:
            UserError: both state the same size differently.
        """
        for name in self.sizes.keys() & other.sizes.keys():
            (ours, place), (theirs, there) = self.sizes[name], other.sizes[name]
            if ours != theirs:
                raise UserError(f"{place} has {name}={ours}, {there} {name}={theirs}.", todo=ONE)
        values = {each.name: getattr(self, each.name) or getattr(other, each.name) for each in fields(self)}
        values |= {"read": self.read + other.read, "settings": self.settings + other.settings}
        return OldDeployment(**values | {"sizes": {**self.sizes, **other.sizes}})

    @property
    def world_size(self) -> int:
        """GPUs of one instance."""
        split = prod(self.sizes.get(name, (1,))[0] for name in ("tp_size", "pp_size", "cp_size"))
        return split if self.sizes or not self.groups else len(self.groups[0])


def read_old(path: Path | None, command: str | None) -> OldDeployment:
    """Read a folder, a script or a command line, or a folder and the command that built its engine.

    Raises:
        UserError: it is no deployment of TensorRT-LLM 1.2, or contradicts itself.
    """
    parts = [] if path is None else [_read_path(path.absolute())]
    parts += [] if command is None else [_read_script(command, "migrate.command")]
    old = reduce(OldDeployment.merged, parts)
    if old.world_size > MOST_GPUS:
        raise UserError(f"The engine is split over {old.world_size} GPUs.", allowed=f"At most {MOST_GPUS}.", todo=ONE)
    for group in old.groups:
        if len(group) != old.world_size:
            have = f"gpu_device_ids has {','.join(group)} for an instance"
            raise UserError(f"{have}; the engine is split over {old.world_size} GPUs.", todo=ONE)
    return old


def _read_path(path: Path) -> OldDeployment:
    if any(path.glob("*/config.pbtxt")):
        return _read_repository(path)
    if (path / CONFIG).is_file():
        return _engine(path)
    if path.is_file() and path.suffix not in (".json", ".pbtxt") and path.stat().st_size < LARGEST_SCRIPT:
        return _read_script(path.read_text(encoding="utf-8", errors="replace"), str(path))
    what = "holds neither an engine nor a model repository" if path.is_dir() else "is not there"
    what = "is no script: give the folder of an engine or repository" if path.is_file() else what
    what = f"has engines, but no {CONFIG}, which trtllm-build wrote beside" if any(path.glob("rank*.engine")) else what
    allowed = f"An engine has {CONFIG} and rank0.engine, a repository <model>/config.pbtxt; a script is a file."
    raise UserError(f"migrate.path='{path}' {what}.", allowed=allowed, todo=BY_COMMAND)


def _engine(folder: Path) -> OldDeployment:
    try:
        return _read_engine(folder)
    except (AttributeError, TypeError, ValueError) as error:  # a value of another type than the builder's
        raise UserError(f"{folder / CONFIG} is not as trtllm-build writes it: {error}.", todo=BY_COMMAND) from None


def _read_engine(folder: Path) -> OldDeployment:
    """Read an engine's config.json; a split that contradicts itself is refused."""
    path = folder / CONFIG
    if '"builder_config"' in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{path} is of TensorRT-LLM before 0.8.", allowed="0.8 to 1.2 are read.", todo=BY_COMMAND)
    raw, pretrained, build = read_engine_config(folder)
    quantization, mapping = pretrained.get("quantization") or {}, pretrained.get("mapping") or {}
    values = {name: value for name, value in build.items() if not isinstance(value, dict)}
    values |= build.get("plugin_config") or {}
    values |= (build.get("lora_config") or {}) if values.get("lora_plugin") not in (None, False, "disable") else {}
    mode, drafts = values.get("speculative_decoding_mode"), values.get("max_draft_len")
    algorithms = {name: quantization.get(name) for name in ("quant_algo", "kv_cache_quant_algo")}
    for name, value in {**algorithms, "speculative_decoding_mode": mode}.items():
        if not isinstance(value, str | int | None):
            raise TypeError(f"{name} is {shown(value)}")
    if isinstance(mode, int) and 0 < mode.bit_length() <= len(MODES):
        values["speculative_decoding_mode"] = MODES[mode.bit_length() - 1]
    if values.get("speculative_decoding_mode") and isinstance(drafts, int) and values.get("max_seq_len"):
        values["max_seq_len"] -= drafts  # the builder added them
    experts = (pretrained.get("moe") or {}).get("num_experts")  # without any, the sizes are stated too
    splits = [name for name in WORDS["sizes"] if experts or not name.startswith("moe_")]
    sizes = {name: (int(mapping.get(name) or 1), str(path)) for name in splits}
    old = OldDeployment(
        read=(str(path),),
        settings=tuple(OldSetting("build", *pair, str(path), given=False) for pair in values.items()),
        version="" if "engine" in raw else str(raw.get("version") or ""),  # of another engine of this project
        pretrained=pretrained,
        algorithms=(algorithms["quant_algo"], algorithms["kv_cache_quant_algo"]),
        sizes=sizes,
        model=_model_of_ours(folder),
    )
    ranks = len(list(folder.glob("rank*.engine"))) or old.world_size
    for count, what in ((mapping.get("world_size", ranks), f"world_size={{}} in {CONFIG}"), (ranks, "{} files")):
        if count != old.world_size:
            split = ", ".join(f"{name}={size}" for name, (size, _) in sizes.items())
            raise UserError(f"{path} has {split}; the engine has {what.format(count)}.", todo=BY_COMMAND)
    return old


def _model_of_ours(folder: Path) -> str:
    """Return the model of an artifact of this project; empty for what others made."""
    model = (read_manifest(folder)["settings"].get("model") if (folder / MANIFEST).is_file() else None) or {}
    return str(model.get("path") or model.get("bundled") or model.get("hub_id") or "")


def _read_repository(folder: Path) -> OldDeployment:
    """Read the parameters of the model with TensorRT-LLM's backend, and its engine if it can be found."""
    from triton_repo.check import read_configs  # tritonclient takes long to import
    from triton_repo.consistency import parameter

    configs, faults = read_configs(sorted(folder.glob("*/config.pbtxt")))
    names = [name for name, config in configs.items() if config.backend == "tensorrtllm" and name != DRAFT]
    if not names and (broken := [fault for fault in faults if fault.message.partition("/")[0] not in configs]):
        raise UserError.of(broken)
    if len(names) != 1:
        backends = (f"{name}: {config.backend or config.platform or 'none'}" for name, config in configs.items())
        what = f"'{folder}' has {len(names)} models with the backend tensorrtllm ({', '.join(backends)})."
        one = "One model with TensorRT engines is migrated at a time; in other backends there is nothing to migrate."
        raise UserError(what, allowed=one)
    model, keys = configs[names[0]], {row["triton_key"]: key for key, row in TEMPLATE["tensorrt_llm"].items()}
    values = {keys.get(key, key): parameter(model, key) for key in sorted(model.parameters)}
    values["triton_max_batch_size"] = str(model.max_batch_size or "")
    old = _of_parameters(values, f"{folder / names[0]}/config.pbtxt")
    if DRAFT in configs:
        drafting = OldSetting("build", "speculative_decoding_mode", MODES[1], f"{folder / DRAFT}/config.pbtxt")
        old = replace(old, settings=(*old.settings, drafting))
    engine = values.get("engine_dir", "")
    places = (Path(engine), folder / engine, folder / names[0] / "1")
    old = reduce(OldDeployment.merged, [*(_engine(each) for each in places if (each / CONFIG).is_file())][:1], old)
    tokenizer = parameter(configs[PREPROCESSING], "tokenizer_dir") if PREPROCESSING in configs else ""
    named = _is_filled(tokenizer) and (tokenizer.startswith("/") or tokenizer.count("/") == 1)  # others are inside
    return replace(old, model=_model_of_ours(folder) or old.model or (tokenizer if named else ""))


def _is_filled(text: str) -> bool:
    """Return whether a parameter has a value: TensorRT-LLM's backend takes its default for an unfilled placeholder."""
    return bool(text) and "${" not in text


def _of_parameters(values: Mapping[str, str], place: str) -> OldDeployment:
    filled = {name: value for name, value in values.items() if _is_filled(value)}
    groups = filter(None, filled.get("gpu_device_ids", "").replace(" ", "").split(";"))
    settings = tuple(OldSetting("triton", *pair, place) for pair in filled.items())
    return OldDeployment(read=(place,), settings=settings, groups=tuple(tuple(group.split(",")) for group in groups))


# Commands: trtllm-build, and what made its checkpoint or filled in the templates, in a script or on one line.

_ASSIGNED, _EXPORTS = re.compile(r"(\w+)=(.*)"), {"export", "local", "readonly", "declare"}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_OPERATORS = ";&|<>"
_ARRAY = re.compile(r"=\(\s*([^)]*)\)")
_PROGRAMS = (PROGRAM, "convert_checkpoint.py", "quantize.py", "fill_template.py")


def _read_script(text: str, source: str) -> OldDeployment:
    """Read the commands of a script; shell variables that it sets to plain values are filled in."""
    commands = list(_commands(text))
    if (builds := [program for program, _ in commands].count(PROGRAM)) != 1:
        raise UserError(f"{source} has {builds} trtllm-build commands; one is migrated at a time.", todo=BY_COMMAND)
    readers = dict.fromkeys(_PROGRAMS, _conversion) | {PROGRAM: _build, "fill_template.py": _filled_template}
    return reduce(OldDeployment.merged, [readers[program](program, options) for program, options in commands])


def _commands(text: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each known program with its options, without dashes, and the words after each."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = _ARRAY.sub(lambda array: "=\n" + array[1].replace("\n", " ") + "\n", text)
    text = re.sub(r"(?<=\s)\d(?=[<>])", "", text)  # the 2 of 2>&1 is no word of the command
    variables: dict[str, str] = {}
    for words in (words for line in text.splitlines() for words in _simple_commands(line)):
        arguments = [part for word in words for part in _expanded(word, variables)]
        assigned = [_ASSIGNED.fullmatch(word) for word in arguments if word not in _EXPORTS]
        if assigned and all(assigned):
            variables |= {match[1]: match[2] for match in assigned if match}
            continue
        start = next((at for at, word in enumerate(arguments[:-1]) if word.rpartition("/")[2] in _PROGRAMS), None)
        if start is not None and arguments[start + 1].startswith("-"):
            options: dict[str, list[str]] = {}
            for word in arguments[start + 1 :]:
                name, equals, value = word.partition("=")
                if word.startswith("-"):
                    options[name.lstrip("-")] = [value] if equals else []
                else:
                    options[next(reversed(options))].append(word)
            yield arguments[start].rpartition("/")[2], options


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line; none of prose with an apostrophe."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return
    ends = [at for at, word in enumerate(words) if not word.strip(_OPERATORS) and word]
    for start, end in pairwise([-1, *ends, len(words)]):
        command = words[start + 1 : end]
        yield [word.rstrip(")") if "(" not in word else word for word in command]  # of a subshell


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """Return a word with the values of variables; one that is a variable alone may be several words, or none."""
    value = _VARIABLE.sub(lambda name: variables.get(name[1] or name[2], name[0] if name[3] is None else name[3]), word)
    return value.split() if value != word and _VARIABLE.fullmatch(word) else [value]


def _filled_template(program: str, options: Mapping[str, list[str]]) -> OldDeployment:
    texts = (text for words in options.values() for word in words for text in re.split(r"(?<!\\),", word))
    pairs = (text.replace("\\", "").partition(":") for text in texts)  # a comma in a value has a backslash
    return _of_parameters({name: value for name, _, value in pairs if name in WORDS["triton"]}, program)


def _build(program: str, options: Mapping[str, list[str]]) -> OldDeployment:
    """Read the options of trtllm-build, also those of versions before 1.2."""
    names = {alias.lstrip("-"): key for key, option in OPTIONS.items() for alias in (option.name, *option.aliases)}
    names |= {name: name for name in WORDS["earlier"]}
    values, faults = {}, []
    for flag, texts in options.items():
        if flag not in names:
            faults.append(Fault(f"{program} has no option --{flag}.", did_you_mean(flag, names)))
            continue
        try:
            values[names[flag]] = _value(names[flag], texts)
        except ValueError as error:
            faults.append(Fault(f"{program} has --{' '.join([flag, *texts])}.", f"{error}."))
    refuse(faults)
    if answer := values.get("max_output_len"):
        values.setdefault("max_seq_len", values.get("max_input_len", OPTIONS["max_input_len"].default) + answer)
    sizes = {name: (values.pop(name), program) for name in WORDS["sizes"] if name in values}
    settings = tuple(OldSetting("build", *pair, program) for pair in values.items())
    return OldDeployment(read=(program,), settings=settings, sizes=sizes)


def _value(name: str, texts: list[str]) -> Any:
    """Return an option's value by its type; ValueError says what trtllm-build takes."""
    option = OPTIONS.get(name)
    kind, choices = (option.type, option.choices) if option else (WORDS["earlier"][name].get("type", "str"), None)
    if kind in (FLAG, LIST):
        return True if kind == FLAG else texts
    text = texts[0].lower() if texts and choices else "".join(texts[:1])
    if len(texts) != 1 or (kind == "int" and not text.isdigit()) or (choices and text not in choices):
        raise ValueError("It takes " + (f"one of {', '.join(choices)}" if choices else "a whole number or one word"))
    return int(text) if kind == "int" else text


def _conversion(program: str, options: Mapping[str, list[str]]) -> OldDeployment:
    """Read how the checkpoint was made: formats, split and model; there are too many other options to know."""
    table, flags = WORDS["convert"], {name: "".join(texts[:1]) for name, texts in options.items()}
    algo: str | None = next((algo for flag, algo in table["flags"].items() if flag in flags), None)
    weight_only = flags.get("weight_only_precision", "int8") if "use_weight_only" in flags else None
    for name, word in {"qformat": flags.get("qformat"), "weight_only_precision": weight_only}.items():
        if word not in (None, *table[name]):
            raise UserError(f"{program} has --{name} {shown(word)}.", allowed=f"Known: {', '.join(table[name])}.")
        algo = algo if word is None else table[name][word]
    stated = {"fp8": "FP8", "int8": "INT8"}.get(flags.get("kv_cache_dtype", ""))
    kv_algo = next((kv for flag, kv in table["kv_flags"].items() if flag in flags), stated)
    stated_ranks = {table["sizes"][name]: text for name, text in flags.items() if name in table["sizes"]}
    ranks = {name: (int(text), program) for name, text in stated_ranks.items() if text.isdigit()}
    model = next((flags[name] for name in table["model"] if "$" not in flags.get(name, "$")), "")
    algorithms = None if table["of_a_checkpoint"] in flags else (algo, kv_algo)  # heads beside a checkpoint made before
    return OldDeployment(read=(program,), algorithms=algorithms, sizes=ranks, model=model)
