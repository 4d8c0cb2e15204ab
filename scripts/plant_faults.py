"""Plant faults in the product, one at a time, and count how many the tests find.

    python -m scripts.plant_faults --faults 40 --seed 1 [--files 40] [-- PYTEST WORDS]

Each fault is planted in a copy of the project. The tests nearest to the changed module, by imports, run there until the
first failure; without words of pytest's they are those of `make test`. A fault that none finds changes nothing that
anybody can see, or a test is missing.
"""

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("pipelines", "eval", "triton_repo")
OPERATORS: dict[str, dict[type[ast.AST], tuple[str, str]]] = {
    "comparison": {
        ast.Lt: ("<", "<="),
        ast.LtE: ("<=", "<"),
        ast.Gt: (">", ">="),
        ast.GtE: (">=", ">"),
        ast.Eq: ("==", "!="),
        ast.NotEq: ("!=", "=="),
        ast.In: ("in", "not in"),
    },
    "scale": {ast.Mult: ("*", "/")},  # a slash may join paths
    "sum": {ast.Add: ("+", "-"), ast.Sub: ("-", "+")},
    "packing": {
        ast.LShift: ("<<", ">>"),
        ast.RShift: (">>", "<<"),
        ast.BitAnd: ("&", "|"),
        ast.FloorDiv: ("//", "%"),
        ast.Mod: ("%", "//"),
    },
    "and, or": {ast.And: ("and", "or"), ast.Or: ("or", "and")},
}
ENDS = re.compile(r"cancel|close|stop|release|clear|unlink|kill|wait|flush|fsync|remove|pop|terminate|replace|set")
KINDS = (*OPERATORS, "off by one", "lost call", "swapped values", "turned condition")
SERVED = ["tests/contract/models", "tests/contract/triton_repo"]  # tests of modules that only a server imports
WORDS = ["-m", "not thorough", "--hypothesis-profile=ci"]
LIMIT_S = 900  # for the tests of one fault; a fault that makes them hang is found


@dataclass(frozen=True)
class Fault:
    """A piece of a module's text, where it starts in the module's bytes, and what stands there instead."""

    kind: str
    file: Path
    line: int
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text).strip() for text in (self.old, self.new))
        return f"{self.kind}: {self.file}:{self.line}: {old} -> {new}"


class Module:
    """Finds in the functions of one module every place for a fault; messages and annotations are no places."""

    def __init__(self, file: Path, source: bytes) -> None:
        self.file, self.source = file, source
        self.lines = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    def faults(self) -> Iterator[Fault]:
        """Yield them in the order of the text."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in node.body:
                    yield from self._below(statement)

    def _below(self, node: ast.AST) -> Iterator[Fault]:
        # what an error says is checked by words; columns inside of f-strings are wrong before Python 3.12
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        yield from self._at(node)
        for name, value in ast.iter_fields(node):
            if name != "annotation":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._below(child)

    def _at(self, node: ast.AST) -> Iterator[Fault]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._operator(left, right, operator)
            case ast.BinOp(left=left, right=right, op=operator) if not (_is_text(left) or _is_text(right)):
                yield from self._operator(left, right, operator)
            case ast.BoolOp(values=[left, right], op=operator):
                yield from self._operator(left, right, operator)
            case ast.Constant(value=int(number)) if self._text(node).isdecimal():
                yield self._fault("off by one", *self._span(node), str(number + 1))
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if ENDS.fullmatch(name):
                yield self._fault("lost call", *self._span(node), "None")
            case ast.Call(keywords=keywords):
                values = [word.value for word in keywords if isinstance(word.value, ast.Name | ast.Attribute)]
                for one, other in pairwise(values):
                    (start, middle), (again, end) = self._span(one), self._span(other)
                    new = self._text(other) + self.source[middle:again].decode() + self._text(one)
                    yield self._fault("swapped values", start, end, new)
            case ast.If(test=test):
                yield self._fault("turned condition", *self._span(test), f"not ({self._text(test)})")

    def _operator(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Fault]:
        start, end = self._span(left)[1], self._span(right)[0]
        for kind, table in OPERATORS.items():
            if row := table.get(type(operator)):
                yield self._fault(kind, start, end, self.source[start:end].decode().replace(*row, 1))

    def _fault(self, kind: str, start: int, end: int, new: str) -> Fault:
        line = self.source.count(b"\n", 0, start) + 1
        return Fault(kind, self.file, line, start, self.source[start:end].decode(), new)

    def _span(self, node: Any) -> tuple[int, int]:
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def places(root: Path) -> dict[str, list[Fault]]:
    """Return every place for a fault, by kind."""
    by_kind = defaultdict[str, list[Fault]](list)
    for path in sorted(path for name in PRODUCT for path in (root / name).rglob("*.py")):
        for fault in Module(path.relative_to(root), path.read_bytes()).faults():
            by_kind[fault.kind].append(fault)
    return by_kind


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Draw faults, each kind in turn, no two in one module."""
    random_, by_kind = random.Random(seed), places(root)
    shuffled = [random_.sample(by_kind[kind], len(by_kind[kind])) for kind in KINDS]
    chosen: dict[Path, Fault] = {}
    for fault in filter(None, chain(*zip_longest(*shuffled))):
        chosen.setdefault(fault.file, fault)
    return list(chosen.values())[:count]


def _imports(file: Path, modules: dict[str, Path]) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        if isinstance(node, ast.Constant) and isinstance(
            node.value, str
        ):  # module:function, imported when it is called
            names = [node.value.partition(":")[0]]
        yield from (modules[name] for name in names if name in modules)
    if file.name.startswith("test_"):
        yield from (path for parent in file.parents if (path := parent / "conftest.py") in modules.values())


@cache
def importers(root: Path) -> dict[Path, set[Path]]:
    """Return who imports each file."""
    files = [path for name in (*PRODUCT, "tests") for path in (root / name).rglob("*.py")]
    modules = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    importing = defaultdict[Path, set[Path]](set)
    for file in files:
        for imported in _imports(file, modules):
            importing[imported].add(file)
    return importing


def nearest(root: Path, file: Path, count: int) -> list[str]:
    """Return the test files that import a module, the most direct first."""
    files, seen, waiting = list[str](), {root / file}, deque([root / file])
    while waiting and len(files) < count:
        for path in sorted(importers(root)[waiting.popleft()] - seen):
            seen.add(path)
            waiting.append(path)
            if path.name.startswith("test_") and not path.is_relative_to(root / "tests" / "gpu"):
                files.append(str(path.relative_to(root)))
    return files


def run(root: Path, words: list[str]) -> tuple[bool, str]:
    """Run tests until the first failure; return whether there was none, and which failed or how pytest ended."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--timeout=300", *words]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"no end in {LIMIT_S} s"
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
    return ran.returncode == 0, named[1] if named else f"pytest ended with {ran.returncode}"


def verdict(root: Path, fault: Fault, files: list[str], words: list[str]) -> tuple[bool | None, str]:
    """Plant a fault, run the tests, take it out again; return whether a test found it, and which.

    None: the test fails without the fault too, so nothing is known.
    """
    path, old = root / fault.file, (root / fault.file).read_bytes()
    path.write_bytes(old[: fault.start] + fault.new.encode() + old[fault.start + len(fault.old.encode()) :])
    passed, name = run(root, [*words, *files])
    path.write_bytes(old)
    if not passed and name.startswith("tests/") and not run(root, [name])[0]:
        return None, f"UNKNOWN: {name} fails without it too"
    return not passed, f"NOT FOUND by {len(files)} files" if passed else f"found by {name}"


def main() -> int:
    """Plant, count, print; exit with 1 unless every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="which (default: 1)")
    parser.add_argument("--files", type=int, default=40, help="nearest test files that run for each (default: 40)")
    parser.add_argument("words", nargs="*", help=f"words for pytest (default: {shlex.join(WORDS)})")
    arguments = parser.parse_args()
    faults, verdicts = draw(ROOT, arguments.faults, arguments.seed), list[bool | None]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "project"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.rstrip("\0").split("\0"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name, follow_symlinks=False)
        for number, fault in enumerate(faults, 1):
            start, files = time.monotonic(), nearest(root, fault.file, arguments.files) or SERVED
            caught, text = verdict(root, fault, files, arguments.words or WORDS)
            verdicts.append(caught)
            print(f"{number:2} {fault}\n   {text}, {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
    counts = f"{verdicts.count(True)} found, {verdicts.count(False)} not found, {verdicts.count(None)} unknown"
    sys.stdout.write(f"seed {arguments.seed}: {counts}\n")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
