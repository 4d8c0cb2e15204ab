"""Measure a checkout: what its code weighs, what takes the settings while planning, files per recipe.

python -m scripts.house                  # this checkout
python -m scripts.house --tree FOLDER    # another one, an older commit for example
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import get_args

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipelines", "eval", "triton_repo")
RECIPE = re.compile(r"^## To add (?P<what>.+)$")
STEP = re.compile(r"^\d+\. .*`[\w./]+`")


def recipe_files(page: Path) -> dict[str, int]:
    """Count the files that each recipe of docs/develop.md lists."""
    counts: dict[str, int] = {}
    what = ""
    for line in page.read_text(encoding="utf-8").splitlines() if page.is_file() else ():
        if match := RECIPE.match(line):
            what = match["what"]
            counts[what] = 0
        elif line.startswith("## "):
            what = ""
        elif what and STEP.match(line):
            counts[what] += 1
    return counts


def weight(tree: Path) -> list[tuple[str, str]]:
    """Return (name, figure) for what the product's code weighs."""
    files = [path for package in PACKAGES for path in sorted((tree / package).rglob("*.py"))]
    functions: list[int] = []
    lines = code = imports = inner = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        empty = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] in ("", "#")}
        lines += text.count("\n")
        for node in ast.walk(module := ast.parse(text)):
            documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
            if documented and ast.get_docstring(node, clean=False) is not None:
                empty.update(_lines(node.body[0]))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(len(_lines(node)))
                inner += sum(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.walk(node))
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += len(_lines(node))
        code += len(set(_lines(module)) - empty)
    docs = tree / "docs"
    from pipelines.settings.root import Settings  # of the checkout, which is first on the path

    return [
        ("product lines", f"{lines:,}"),
        ("product code lines", f"{code:,}"),
        ("modules", f"{len(files):,}"),
        ("functions per 1,000 code lines", f"{1000 * len(functions) / code:.0f}"),
        ("functions above 60 lines", str(sum(length > 60 for length in functions))),
        ("import lines per 100 code lines", f"{100 * imports / code:.1f}"),
        ("imports inside functions", str(inner)),
        ("keys of the settings", str(len(list(_keys(Settings))))),
        ("pages in docs/", str(len(list(docs.glob("*.md"))))),
        ("decisions", str(len(list((docs / "decisions").glob("[0-9]*.md"))))),
    ]


def _keys(group: type[BaseModel]) -> Iterator[str]:
    """Yield the names of all keys; those of a group that may be null count like any other."""
    for name, field in group.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        yield from _keys(inner[0]) if inner else (name,)


def settings_traffic(target: str) -> tuple[int, int, int]:
    """Count what the settings pass through while `quant=fp8` is planned, and how often they are made anew.

    Returns:
        functions that take the settings, or a record that holds them, as an argument (methods of these records do not
        count, nor generated constructors); modules of these functions; copies of the settings with other values.
    """
    from pipelines.host.machine import gather
    from pipelines.plan.plan import make_plan
    from pipelines.plan.targets import Goal
    from pipelines.settings.compose import load
    from pipelines.settings.root import Settings
    from pipelines.store.store import Store

    taken: set[tuple[str, str]] = set()
    copies = 0

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal copies
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if event != "call":
            return
        if code.co_name == "model_copy" and isinstance(frame.f_locals["self"], Settings):
            copies += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        held = any(isinstance(frame.f_locals.get(name), Settings | Goal) for name in names if name != "self")
        if held and module.startswith(PACKAGES) and not code.co_name.startswith(("<", "__")):
            taken.add((module, code.co_qualname))

    with TemporaryDirectory() as folder:
        words = ["quant=fp8", f"paths.store={folder}/store", f"paths.runs={folder}/runs"]
        settings = load(words)
        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            make_plan(settings, target, Store(settings.paths.store), gather())  # type: ignore[arg-type]
        finally:
            sys.setprofile(before)
    return len(taken), len({module for module, _ in taken}), copies


def _lines(node: ast.AST) -> range:
    if isinstance(node, ast.Module):
        return range(1, (node.body[-1].end_lineno or 0) + 1) if node.body else range(0)
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def measure(tree: Path) -> list[tuple[str, str]]:
    """Return (name, figure) for every measure."""
    sys.path.insert(0, str(tree))
    rows = weight(tree)
    for target in ("build", "all"):
        functions, in_modules, copies = settings_traffic(target)
        rows += [
            (f"functions (modules) that take the settings while `{target}` is planned", f"{functions} ({in_modules})"),
            (f"copies of the settings while `{target}` is planned", str(copies)),
        ]
    files = recipe_files(tree / "docs" / "develop.md")
    return rows + [(f"files to add {what}", str(count)) for what, count in files.items()]


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout of the project")
    rows = measure(parser.parse_args().tree.resolve())
    print("| | |\n|---|---:|")  # noqa: T201
    print("\n".join(f"| {what} | {figure} |" for what, figure in rows))  # noqa: T201


if __name__ == "__main__":
    main()
