"""Check the words of a command line before anything runs, and suggest the likely meaning."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from pipelines.cli.commands import COMMANDS
from pipelines.domain.errors import Fault, UserError, as_question, did_you_mean, meanings, refuse
from pipelines.settings.former import choices_elsewhere, elsewhere
from pipelines.settings.groups import choices, groups

USUAL = ("quant", "model", "engine", "hardware", "workload", "parallel")
"""Groups that are searched first for a bare choice."""
MOST_MEANINGS = 3
"""A choice that more groups have (none, default, auto) gives no hint of what was meant."""


def check_command(name: str, targets: Iterable[str] = ()) -> None:
    """Refuse a first word that is not a command.

    Raises:
        UserError: it is not a command; the message has the nearest command or override.
    """
    if name in COMMANDS:
        return
    message, allowed = f"'{name}' is not a command.", f"Commands: {', '.join(COMMANDS)}."
    if name.startswith("-"):
        raise UserError(f"'{name}' is not an option.", allowed="Options: --help, --version, --completion bash|zsh.")
    if name in groups_with_keys():
        raise UserError(message, todo=f"To explain the keys of this group of settings: make config {name}")
    known = [*COMMANDS, *targets]
    meant = [name] if "=" in name else _meanings(name)
    if meant and (meant[0].endswith(name) or not get_close_matches(name, known, cutoff=0.75)):
        raise UserError(message, todo=f"Did you mean 'make build {meant[0]}'?")
    raise UserError(message, allowed=allowed, todo=did_you_mean(name, known))


def overrides_of(command: str, words: Sequence[str]) -> list[str]:
    """Return the overrides after a command; for `config`, the name of a group is among them and comes first.

    Raises:
        UserError: some words are not overrides; all are named, each with its likely meaning.
    """
    rest, overrides, faults = list(words), [], []
    if COMMANDS[command].argument and (named := [word for word in rest if word in groups_with_keys()]):
        rest.remove(named[0])
        overrides.append(named[0])
    while rest:
        count, fault = _first(rest, command)
        if fault is None:
            overrides.append(rest[0])
        else:
            faults.append(fault)
        del rest[:count]
    refuse(faults)
    return overrides


def groups_with_keys() -> list[str]:
    """List what `config` explains: groups of conf/, and groups in conf/config.yaml itself."""
    return sorted({*groups(), "llm_api", "paths", "store", "plan", "stage", "verify", "diagnose", "doctor", "migrate"})


def _first(rest: Sequence[str], command: str) -> tuple[int, Fault | None]:
    """Return how many of the words belong together, and what is wrong with them."""
    word, following = rest[0], rest[1] if len(rest) > 1 else ""
    if word.startswith("-"):
        return _flag(word, following)
    if following == "=" and len(rest) > 2:
        return 3, _spaced(rest[:3])
    if (word.endswith("=") and _is_bare(following)) or (_is_bare(word) and following.startswith("=")):
        return 2, _spaced(rest[:2])
    return 1, _bare(word, command) if _is_bare(word) else None


def _is_bare(word: str) -> bool:
    return word != "" and "=" not in word and word[0] not in "~-"


def _flag(word: str, following: str) -> tuple[int, Fault]:
    """Explain `--quant fp8` and `--quant=fp8`: settings are not flags."""
    key, equals, value = word.lstrip("-").partition("=")
    takes_next = not equals and _is_bare(following)
    key, value = key.replace("-", "_"), value or (following if takes_next else "...")
    typed = f"{word} {following}" if takes_next else word
    ours = [key] if key.split(".")[0] in groups_with_keys() else elsewhere(key)
    todo = as_question([f"{each}={value}" for each in ours])
    fault = Fault(f"'{typed}' is not an option.", "Settings are written key=value, without dashes.", todo)
    return (2 if takes_next else 1), fault


def _spaced(words: Sequence[str]) -> Fault:
    return Fault(f"'{' '.join(words)}' has blanks around '='.", todo=f"Write {''.join(words)}")


def _bare(word: str, command: str) -> Fault:
    if word in COMMANDS:
        return Fault(
            f"'{command}' and '{word}' are two commands.",
            todo=f"Give one at a time: make {command} ..., then make {word} ...",
        )
    message = f"'{word}' is not a valid override (expected key=value)."
    if word in groups():
        return Fault(message, f"Choices: {', '.join(choices(word))}.", f"Write {word}=...")
    if meant := _meanings(word):
        return Fault(message, todo=f"Did you mean {' or '.join(meant)}?")
    if COMMANDS[command].argument and word not in groups_with_keys():
        names = groups_with_keys()
        hint = did_you_mean(word.split(".")[0], names)
        return Fault(f"'{word}' is not a group of settings.", f"Groups: {', '.join(names)}.", hint)
    if word.split(".")[0] in groups_with_keys():
        return Fault(message, todo=f"Write {word}=...")
    return Fault(message, todo=f"`make help {command}` lists its settings.")


def _meanings(word: str) -> list[str]:
    """List overrides that a bare word may mean: int4_awq -> quant=int4_awq, quant:fp8 -> quant=fp8."""
    left, colon, right = word.partition(":")
    if colon and left.split(".")[0] in groups_with_keys():
        return [f"{left}={right}"]
    order = [*USUAL, *(group for group in groups() if group not in USUAL)]
    names_of = {group: choices(group) for group in order}
    exact = [f"{group}={word}" for group, names in names_of.items() if word in names]
    if exact:
        return exact if len(exact) <= MOST_MEANINGS else []
    if called := [f"{group}={choice}" for group in USUAL for choice in choices_elsewhere(group, word)]:
        return called
    near = meanings(word, [name for group in USUAL for name in names_of[group]])
    return [f"{group}={name}" for name in near for group in USUAL if name in names_of[group]]
