"""Find settings, choices and commands that are named in texts but do not exist."""

import ast
import difflib
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from pipelines.cli.commands import COMMANDS, PROGRAM
from pipelines.settings.base import OptionTable
from pipelines.settings.describe import keys_of
from pipelines.settings.former import REMOVED, RENAMED
from pipelines.settings.groups import CONF, choices, groups
from pipelines.settings.root import Settings
from tests.conftest import ROOT

GAP = "…"
"""Placeholder for the values of an f-string and for the open parts of an example."""
ENDINGS = (
    *("cache", "csv", "html", "js", "json", "jsonl", "log", "md", "npy", "npz", "onnx", "pbtxt", "png", "py"),
    *("safetensors", "sbatch", "sh", "vocab", "yaml", "xml"),
)
"""Endings that, after a group's name, form a file name: report.html, build.sbatch, model.safetensors."""
TENSORS = re.compile(r"model\.(layers|embed_tokens|norm)\b")
"""Tensor names in Hugging Face checkpoints, which begin like settings of the group `model`."""
EXAMPLES = {"quant=w4a16_nvfp4", "report.suffix", "engine.flavour", "model=ours", "experiment=chat"}
"""Names in the recipes of docs/develop.md: those that the recipes add, and a key of an engine's own config.json."""
OPEN = re.compile(rf"[{GAP}‹›<>|*$]|\.\.\.|^[A-Z0-9_]+$|^[/~\[]|^glob\(|^\w+\($|^$")
"""Values that are placeholders or cannot be looked up: paths, lists, patterns."""
ENGLISH = {
    *("a", "an", "and", "any", "both", "ends", "every", "everything", "it", "its", "made", "more", "no", "of", "off"),
    *(
        "one",
        "or",
        "out",
        "passes",
        "room",
        "sense",
        "sure",
        "target",
        "that",
        "the",
        "them",
        "these",
        "this",
        "up",
        "what",
    ),
}
"""Words that follow "make" where it is an ordinary verb."""


@dataclass(frozen=True)
class Text:
    """A text of the project and its location."""

    file: Path
    line: int
    text: str


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Yield all strings of the program except docstrings, and all lines of the documentation, conf/ and Makefile."""
    for package in ("pipelines", "eval", "triton_repo"):
        for file in sorted((root / package).rglob("*.py")):
            yield from strings(file)
    pages = [*sorted((root / "docs").rglob("*.md")), root / "README.md", root / "Makefile"]
    for file in [*pages, *sorted((root / "conf").rglob("*.yaml"))]:
        for line, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            yield Text(file, line, text)


def strings(file: Path) -> Iterator[Text]:
    """Yield a module's strings except docstrings; f-strings have a gap for each value."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield Text(file, node.lineno, "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | inside:
            yield Text(file, node.lineno, node.value)


@cache
def known_keys() -> frozenset[str]:
    """Return every key of the settings' classes and of every file in conf/, including groups."""
    found = set(groups())
    for name, field in Settings.model_fields.items():
        found |= set(_keys_of(field.annotation, name))
    for group in groups():
        for choice in choices(group):
            config = OmegaConf.load(CONF / group / f"{choice}.yaml")
            found |= (
                {f"{group}.{key}" for key in config if "/" not in str(key)} if isinstance(config, DictConfig) else set()
            )
    return frozenset(found)


def _keys_of(annotation: object, name: str) -> Iterator[str]:
    yield name
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            for attribute, field in each.model_fields.items():
                key = f"{name}.{attribute}"
                if table := OptionTable.of(field):
                    yield from (key, *(f"{key}.{option}" for option in (*table.kinds, *table.refused)))
                else:
                    yield from _keys_of(field.annotation, key)
        elif typing.get_origin(each) is dict:
            yield f"{name}.*"


@cache
def known_values() -> dict[str, tuple[str, ...]]:
    """Return the allowed values of every key that has a fixed set of them."""
    return {key.name: key.choices for group in Settings.model_fields for key in keys_of(group) if key.choices}


@cache
def targets() -> frozenset[str]:
    """Return the targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    return frozenset(" ".join(re.findall(r"^(?:COMMANDS|TARGETS) := (.*)", makefile, re.MULTILINE)).split())


@cache
def _settings() -> str:
    """Return a pattern for a group or setting and what is given for it."""
    names = "|".join(sorted({*groups(), *Settings.model_fields}, key=len, reverse=True))
    word = rf"[\w{GAP}‹›<>-]+"
    return rf"(?<![\w./\\{GAP}@-])(?<!-m )({names})((?:\.{word})*)(?:=([^\s`'\";)\]|]*))?"


def unknown(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name in a text that does not exist in the project, with the nearest one that does."""
    text = re.sub(r"\{[^{}]*\}", GAP, text)  # a template is filled in later
    yield from _unknown_commands(text)
    for found in re.finditer(_settings(), text):
        group, path, value = found.group(1), found.group(2).rstrip("-"), (found.group(3) or "").rstrip(".,:")
        after = text[found.end() : found.end() + 1]
        if not path and found.group(3) is not None:
            yield from _unknown_value(group, value, (*choices(group), "null"))
        elif path and path.split(".")[-1] not in ENDINGS and after != "(" and not TENSORS.match(group + path):
            if after == "*":
                yield from _unknown_start(group + path)
            elif faults := list(_unknown_key(group + path)):
                yield from faults
            elif (group + path) in known_values():
                yield from _unknown_value(group + path, value, (*known_values()[group + path], "null"))


def _unknown_commands(text: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"(?<![\w-])make ([a-z][a-z-]*)(?![\w:./])", text):
        if found.group(1) not in targets() | ENGLISH:
            yield f"make {found.group(1)}", _nearest(found.group(1), targets(), "make ")
    for found in re.finditer(rf"{PROGRAM} ([a-z]+)", text):
        if found.group(1) not in COMMANDS:
            yield found.group(), _nearest(found.group(1), COMMANDS, f"{PROGRAM} ")
    for found in re.finditer(r"-m ((?:pipelines|eval|triton_repo|scripts)(?:\.\w+)*)", text):
        place = ROOT / found.group(1).replace(".", "/")
        if not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file():
            yield f"-m {found.group(1)}", ""


def _unknown_value(name: str, given: str, values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for value in given.split(","):
        if not OPEN.search(given) and value not in values and f"{name}={value}" not in EXAMPLES:
            yield f"{name}={value}", _nearest(value, values, f"{name}=")


def _unknown_start(start: str) -> Iterator[tuple[str, str]]:
    if not any(key.startswith(start) for key in known_keys()):
        yield f"{start}*", _nearest(start, known_keys())


def _unknown_key(key: str) -> Iterator[tuple[str, str]]:
    parts = key.split(".")
    for at in range(2, len(parts) + 1):
        start = ".".join(parts[:at])
        if re.search(rf"[{GAP}‹›<>]", parts[at - 1]) or ".".join([*parts[: at - 1], "*"]) in known_keys():
            return
        if start not in known_keys():
            if key not in {*RENAMED, *REMOVED, *EXAMPLES}:
                yield key, _nearest(key, known_keys())
            return


def _nearest(word: str, words: Iterable[str], before: str = "") -> str:
    near = difflib.get_close_matches(word, list(words), 1, 0.3)
    return before + near[0] if near else ""
