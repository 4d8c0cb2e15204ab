"""Every recipe of docs/develop.md works as it stands: its code is put where it says, and its command runs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = ("pipelines", "conf", "eval", "triton_repo")
RECIPES = {
    "a quantization format": "build model=tiny_llama quant=w4a16_nvfp4",
    "a model family": "plan model=skywork quant=fp8 engine=tensorrt_llm hardware=h100_sxm",
    "an engine": "plan engine=lookup model=tiny_llama quant=none",
    "a metric": "plan model=llama_3_8b quant=fp8 engine=tensorrt_llm hardware=h100_sxm",
    "a setting": "config report report.suffix=x",
}
ANSWERS = {
    "a quantization format": "build +made",
    "a model family": "8[.,]\\d+|6[.,]\\d+ M parameters|Skywork|skywork",
    "an engine": "engine: lookup \\(asked for\\)",
    "a metric": "modelled under workload=fixed",
    "a setting": "report.suffix=x\n +text\n +What follows the names of files",
}
BLOCK = re.compile(r"^ {3}```(?:python|yaml)\n(.*?)^ {3}```", re.MULTILINE | re.DOTALL)


def recipe(title: str) -> str:
    """The section of the page, from its heading to the next."""
    page = (ROOT / "docs" / "develop.md").read_text(encoding="utf-8")
    return page.partition(f"## To add {title}\n")[2].partition("\n## ")[0]


def steps(text: str) -> list[tuple[str, str]]:
    """Each piece of code, with the file that the text before it names."""
    found = []
    for block in BLOCK.finditer(text):
        named = re.findall(r"^\d+\. `([^`]+)`", text[: block.start()], re.MULTILINE)
        found.append((named[-1], textwrap.dedent(block.group(1))))
    return found


def put(folder: Path, name: str, code: str) -> None:
    """Put code where its first line says: `# in NAME`; without such a line at the end of the file."""
    file, (first, _, rest) = folder / name, code.partition("\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not first.startswith("# in "):
        with file.open("a", encoding="utf-8") as opened:
            opened.write(code)
        return
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    line, column, text = place(ast.parse(source), first.removeprefix("# in "), lines, rest)
    lines[line] = lines[line][:column] + text + lines[line][column:]
    file.write_text("".join(lines), encoding="utf-8")


def place(tree: ast.Module, name: str, lines: list[str], code: str) -> tuple[int, int, str]:
    """The line and column where a class, table or docstring ends, and the code as it stands there."""
    name, _, part = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if part:
                return node.body[0].end_lineno - 1, 0, textwrap.indent(code, "    ")
            field = next(each for each in reversed(node.body) if isinstance(each, ast.AnnAssign | ast.Assign))
            return field.end_lineno, 0, textwrap.indent(code, "    ")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            before = "".join(lines[: node.end_lineno - 1]) + lines[node.end_lineno - 1][: node.end_col_offset - 1]
            comma = "" if before.rstrip()[-1] in ",([{" else ","
            return node.end_lineno - 1, node.end_col_offset - 1, f"{comma}\n{textwrap.indent(code, '    ')}"
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize(
    "title", [pytest.param(each, marks=pytest.mark.thorough) if "format" in each else each for each in RECIPES]
)
def test_a_recipe_works_as_it_stands(title: str, tmp_path: Path) -> None:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)  # with bytecode, which is valid there too
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, code in steps(recipe(title)):
        put(tmp_path, name, code)
    command = [sys.executable, "-m", "pipelines", *RECIPES[title].split()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(ANSWERS[title], ran.stdout), ran.stdout
    if title == "a metric":
        show = "from pipelines.domain.metrics import LATENCIES; print(LATENCIES[-1].key)"
        shown = subprocess.run(
            [sys.executable, "-c", show], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout == "itl_p999_s\n"
