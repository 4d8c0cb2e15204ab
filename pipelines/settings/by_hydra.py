"""The door to Hydra: compose conf/, complete a word, and explain what Hydra refuses in the user's own terms.

Hydra takes longer to load than to compose plain overrides without it (`plain`), so this is imported where it is needed.
"""

import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.domain.errors import MOST_MEANINGS, Fault, UserError, as_question, meanings, refuse
from pipelines.settings.base import FOLDERS, Group, OptionTable, at, group_in, keys_of
from pipelines.settings.former import choices_elsewhere, elsewhere, former
from pipelines.settings.groups import CONF, choices, config_folders, groups
from pipelines.settings.plain import DEFAULTS, PROJECT, RESOLVERS, override, unresolved
from pipelines.settings.project import NotPlainError, project_content
from pipelines.settings.root import Settings

KEY = re.compile(r"(\+\+|[+~])?[A-Za-z_][\w-]*([./@][\w-]+)*")
PAIRS = {"[": "]", "{": "}", "(": ")"}


@contextmanager
def hydra_on_conf() -> Iterator[None]:
    """Let Hydra compose conf/ and the project, with the defaults of all keys and the functions of `${...}`."""
    ConfigStore.instance().store(DEFAULTS, Settings.defaults())
    ConfigStore.instance().store(PROJECT, project_content())
    OmegaConf.register_new_resolver(
        "project_folders", lambda: [f"file://{folder}" for folder in config_folders()[1:]], replace=True
    )
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    with initialize_config_dir(str(CONF), job_name="pipelines", version_base="1.3"):
        yield


def compose_config(overrides: Sequence[str]) -> Any:
    """Compose conf/ with a user's overrides, with Hydra.

    Returns:
        an OmegaConf DictConfig without the `hydra` node.

    Raises:
        UserError: unknown groups, choices or keys, all at once.
    """
    for text in overrides:
        if text.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher")):
            raise UserError(
                f"{text} starts the cells of a sweep; this command has one and runs it here.",
                todo="Use it with `make sweep` or `make compare`.",
            )
    refuse(
        Fault(f"'{text}' removes a setting, and each needs a value.", todo="Give it another one, or null.")
        for text in overrides
        if text.startswith("~")
    )
    if not all(KEY.match(text) for text in overrides):
        raise UserError.of(diagnose(overrides))
    keys = [(text, text.partition("=")[0].lstrip("+")) for text in overrides if "=[" in text]
    # Hydra would merge the choices, the last one on top
    refuse(_list_fault(text, key) for text, key in keys if key in groups())
    try:
        with hydra_on_conf():
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError):  # ValueError: a number for a name
        raise UserError.of(diagnose(overrides) or [unexplained(overrides)]) from None


def to_raw(config: Any) -> dict[str, Any]:
    """Resolve a configuration to plain dictionaries.

    Raises:
        UserError: a required value is missing, or an interpolation fails.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        refuse(Fault(f"{key} must be given.", todo=f"Add {key}=...") for key in missing)
        raw: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        return raw
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise UserError(
            f"{key}='{at(OmegaConf.to_container(config, resolve=False), key)}' cannot be resolved.",
            allowed="${group.key} takes the value of another setting, ${oc.env:NAME} that of an environment variable.",
            todo="Refer to one that exists, or give the value itself.",
        ) from None


def hydra_candidates(before: Sequence[str], word: str) -> list[str]:
    """List what Hydra's own completion finds."""
    with hydra_on_conf():
        plugins: Any = Plugins.instance().discover(CompletionPlugin)
        plugin = next(each for each in plugins if each.provides() == "bash")
        output = io.StringIO()
        os.environ["COMP_LINE"] = " ".join(["program", *before, word])
        try:
            with redirect_stdout(output):
                plugin(GlobalHydra.instance().config_loader()).query("config")
        except (HydraException, OmegaConfBaseException, ValueError):
            return []  # an earlier word is wrong, which the command itself will report
    return output.getvalue().split()


def parse_override(text: str) -> Any:
    """Read one override with Hydra's parser.

    Raises:
        UserError: it is not a valid override.
    """
    if not KEY.match(text):
        raise UserError.of([_syntax_fault(text)])
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise UserError.of([_syntax_fault(text)]) from None


def _syntax_fault(text: str) -> Fault:
    """Explain why a text is not `key=value`."""
    key, equals, value = text.partition("=")
    message = f"'{text}' is not a valid override (expected key=value)."
    if not equals:
        return Fault(message, todo="Write key=value, e.g. quant=fp8 or build.max_batch_size=64.")
    if not KEY.fullmatch(key):
        near = re.sub(r"[^\w./@-]", "", key).lstrip("-.")
        hint = f"Did you mean '{near}={value.strip()}'?" if near != key and KEY.fullmatch(near) else ""
        return Fault(f"{message} '{key}' is not the name of a setting.", todo=hint)
    if _is_open(value):
        return Fault(f"{message} A bracket or quote in '{value}' is not closed, or not opened.")
    if value[:1] in ("[", "{"):
        return Fault(
            f"{message} '{value}' is no list ('[8,16]') and no mapping ('{{name: value}}'): a comma or colon has"
            " nothing beside it, or a text in it is not in quotes."
        )
    return Fault(
        f"{message} '{value}' has characters with a meaning of their own.",
        todo=f"Quote the value, once for the shell and once for this program: {shlex.quote(override(key, value))}",
    )


def _is_open(value: str) -> bool:
    expected: list[str] = []
    quote = ""
    for letter in re.sub(r"\\.", "", value):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in PAIRS:
            expected.append(PAIRS[letter])
        elif letter in PAIRS.values() and (not expected or expected.pop() != letter):
            return True
    return bool(quote or expected)


def diagnose(overrides: Sequence[str], *, sweeping: bool = False) -> list[Fault]:
    """Judge each override on its own."""
    faults: list[Fault] = []
    good, named, known_groups = [], [], groups()
    for text in overrides:
        try:
            override = parse_override(text)
        except UserError as error:
            faults += error.faults
            continue
        name = override.get_key_element().lstrip("+~").split("@")[0]
        if name.split(".")[0].split("/")[0] == "hydra":
            continue
        if override.is_sweep_override() and not sweeping:
            faults.append(_list_fault(text, name))
        elif name in known_groups and text.startswith("+"):
            faults.append(Fault(f"'{text}' begins with '+', which no group takes.", todo=f"Write {text.lstrip('+')}"))
        elif name in known_groups:
            values = _values(override)
            place, one = override.package or name, len(values) == 1
            typed = [text if one else f"{name}={value}" for value in values]
            wrong = [fault for pair in zip(values, typed, strict=True) if (fault := _choice_fault(name, *pair, place))]
            faults += wrong
            good += [f"{name}={values[0]}"] if values and not wrong else []
        else:
            named.append((name, text, override))
    keys = _known_keys(good)
    return faults + [fault for name, text, how in named for fault in _key_faults(name, text, how, keys)]


def unexplained(overrides: Sequence[str]) -> Fault:
    """Make the error for overrides that are valid individually but cannot be composed."""
    suspects = [text for text in overrides if "${" in text or "@" in text or text.startswith(("~", "hydra"))]
    overrides_text = " ".join(suspects or overrides)
    draft = next((text for text in suspects if text.startswith("model@speculative.draft=")), None)
    if draft and "speculative=draft_target" not in overrides:
        return Fault(f"'{draft}' names a draft model, which is not used here.", todo="Add speculative=draft_target.")
    return Fault(
        f"'{overrides_text}' cannot be applied to the configuration.",
        todo="Check the spelling: `make config GROUP` lists the keys of a group.",
    )


def _values(override: Any) -> list[str]:
    """List what an override chooses: one word, the words of a list, or none for a pattern."""
    if isinstance(override.value(), ChoiceSweep):
        return list(override.sweep_string_iterator())
    return [] if override.is_sweep_override() else [override.get_value_element_as_str()]


def _list_fault(text: str, name: str) -> Fault:
    key, _, value = text.partition("=")
    if name == "hardware" and "," in value and "(" not in value:
        several = shlex.quote(f"{key}=[{value.strip('[]')}]")
        return Fault(
            f"'{text}' names several GPUs, but this command takes one.",
            todo=f"To choose among them: make size {several}.",
        )
    if name in groups():
        is_list, value = value.startswith("["), value.strip("[]")
        if is_list and "," not in value:
            return Fault(f"'{text}' is a list, and one choice is taken.", todo=f"Write {key}={value or '...'}")
    text = f"{key}={value}"
    typed, one = shlex.quote(text), shlex.quote(f"{key}=[{value}]")
    as_list = "" if name in groups() or "(" in value else f" For one run with a list as its value: {one}."
    return Fault(
        f"'{text}' has several values, but this command takes one.",
        todo=f"To run one after another: make sweep {typed} (accuracy), or make compare {typed} (accuracy, size "
        f"and speed).{as_list}",
    )


def _choice_fault(group: str, choice: str, typed: str, place: str) -> Fault | None:
    """Make the fault for a preset that its group does not have; `place` is where its settings would go.

    `typed` is the override as it was typed, which Hydra's values may not be: 24 of 2_4.
    """
    if choice in choices(group):
        return None
    return Fault(
        f"{typed} is not known.",
        f"Choose one of {', '.join(choices(group))}.",
        _place_hint(group, choice, place) or as_question(_choices_meant(group, choice)),
    )


def _choices_meant(group: str, choice: str) -> list[str]:
    return choices_elsewhere(group, choice) or meanings(choice, choices(group))


def _place_hint(group: str, choice: str, place: str) -> str:
    """Say where a folder, a file or a model of the Hub belongs, if one was given in place of a preset's name."""
    if "/" not in choice:
        return ""
    if group == "model":
        here = choice.startswith(("/", ".", "~"))
        key = group if place == group else f"{group}@{place}"
        if ours := _of_repository(choice):
            return f"The choice with this repository of the Hub is {key}={ours}."
        on_the_hub = "" if here else f"; for a model of the Hub: {key}=hub {place}.hub_id={choice}"
        return f"For a folder of yours: {place}.path={choice}{on_the_hub}"
    return f"For a text of yours: calibration=local calibration.path={choice}" if group == "calibration" else ""


def _of_repository(name: str) -> str:
    """Return the choice of a model whose weights are in this repository of the Hub; an empty string without one."""
    line = re.compile(rf"^hub_id: {re.escape(name)}$", re.MULTILINE | re.IGNORECASE)
    files = {each: folder / "model" / f"{each}.yaml" for folder in config_folders() for each in choices("model")}
    return next((each for each, file in files.items() if file.is_file() and line.search(file.read_text())), "")


def _known_keys(overrides: Sequence[str]) -> set[str]:
    try:
        config = unresolved(overrides)
    except NotPlainError:
        return set()
    keys: set[str] = set()

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            keys.add(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(config, "")
    return keys


def _key_faults(key: str, text: str, override: Any, keys: set[str]) -> list[Fault]:
    if override.is_add():
        if key not in keys or override.is_force_add():
            return []
        return [Fault(f"'{text}' adds a setting that is already there.", todo=f"Write {text[1:]} to change it.")]
    if not keys:
        return []
    if key not in keys:
        return [_unknown_key(key, text.partition("=")[2], keys)]
    value = override.value()
    if not isinstance(value, dict) or not any(each.startswith(f"{key}.") for each in keys):
        return []
    inside = {f"{key}.{name}": str(inner) for name, inner in value.items()}
    return [_unknown_key(name, inner, keys) for name, inner in inside.items() if name not in keys]


def _unknown_key(key: str, value: str, keys: set[str]) -> Fault:
    message = f"'{key}' is not a known setting."
    if known := former(key):
        return known
    if moved := _moved(key, value):
        return Fault(message, *moved)
    group, _, leaf = key.rpartition(".")
    if names := sorted(name.rpartition(".")[2] for name in keys if group and name.rpartition(".")[0] == group):
        hint = as_question(_meant(group, leaf, names, keys)) or FOLDERS.get(group, "")
        return Fault(message, hint, keys_of(group, names, leaf))
    if group in keys and leaf in (inside := _inside(group)):
        return Fault(
            f"'{key}' cannot be set alone: {group} is no mapping here.",
            f"In its place goes a mapping with the keys {', '.join(inside)}.",
            f"Give what it needs together: {group}={{{leaf}: {value}, ...}}",
        )
    hint = as_question(_meant("", leaf, [], keys) or meanings(key, keys | set(groups())))
    return Fault(message, hint, "`make config` prints all of them.")


def _meant(group: str, leaf: str, names: Sequence[str], keys: set[str]) -> list[str]:
    """List what may be meant by an unknown key: by its name in other tools, in its group, in other groups."""
    if ours := elsewhere(f"{group}.{leaf}"):
        return ours
    own = [f"{group}.{name}" for name in meanings(leaf, names)]
    same = [] if group in FOLDERS else sorted(name for name in keys if name.endswith(f".{leaf}"))
    return own if own and leaf in own[0] else same[:MOST_MEANINGS] or own


def _inside(key: str) -> list[str]:
    """List the keys of the mapping that can stand in place of a value; none if only a list of them can."""
    kind: type[Group] | None = Settings
    for part in key.split("."):
        annotation = kind.model_fields[part].annotation if kind and part in kind.model_fields else None
        kind = None if get_origin(annotation) is tuple else group_in(annotation)
    return list(kind.model_fields) if kind else []


def _moved(key: str, value: str) -> tuple[str, str] | None:
    """Say what became of a former key that is now an option inside a mapping, e.g. build.paged_state."""
    group, _, name = key.partition(".")
    kind = Settings.group(group)
    fields = kind.model_fields if kind else {}
    for place, table in ((f"{group}.{field}", OptionTable.of(info)) for field, info in fields.items()):
        if table and name in table.refused:
            return f"It cannot be set: {table.refused[name]}.", ""
        if table and name in table.kinds:
            return f"It is now {place}={{{name}: {value}}}.", f"Write {place}.{name}={value}."
    return None
