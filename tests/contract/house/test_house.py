"""The layout that import contracts cannot see: where files stand, and code that runs inside tritonserver."""

import ast
import re
import tomllib

import pytest

from tests.conftest import ROOT

PIPELINES = ROOT / "pipelines"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
LAYERS = next(each["layers"] for each in CONTRACTS if each["type"] == "layers")
DATA = {"bundled"}
"""Folders of pipelines/ without code."""


def test_the_root_of_pipelines_has_packages_only():
    assert {path.name for path in PIPELINES.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_package_stands_on_a_floor():
    """So that no new package escapes the contract."""
    named = {room.strip() for layer in LAYERS for room in layer.split("|")}
    folders = {path.parent.name for path in PIPELINES.glob("*/*.py")} - DATA
    assert {f"pipelines.{name}" for name in (*folders, "__main__")} | {"eval", "triton_repo"} == named


def test_folders_of_data_have_no_code():
    assert not [path for name in DATA for path in (PIPELINES / name).rglob("*.py")]


@pytest.mark.parametrize("file", sorted((ROOT / "triton_repo/models").rglob("*.py")), ids=lambda file: file.parent.name)
def test_code_inside_tritonserver_imports_from_floors_below_the_repository(file):
    """These files are copied into repositories and are no package, so the contracts do not see them."""
    below = next(i for i, layer in enumerate(LAYERS) if "triton_repo" in layer)
    allowed = {room.strip() for layer in LAYERS[below + 1 :] for room in layer.split("|")}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pipelines."):
            assert ".".join(str(node.module).split(".")[:2]) in allowed, node.module


def test_files_that_recipes_name_exist():
    """docs/develop.md: a path in backticks, but for placeholders in capitals and what the examples add."""
    text = (ROOT / "docs/develop.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:pipelines|conf|eval|triton_repo|scripts|tests|docs)/[\w./-]+)`", text)
    assert not [
        path
        for path in paths
        if not re.search(r"[A-Z]{2,}|w4a16_nvfp4|skywork|lookup", path) and not (ROOT / path).exists()
    ]


def test_no_message_names_a_page_that_an_installed_wheel_lacks():
    """Rules name pages as their sources, on a page of docs/ themselves."""
    named = []
    for file in sorted(
        path for folder in ("pipelines", "eval", "triton_repo") for path in (ROOT / folder).rglob("*.py")
    ):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        if file.parent.name == "rules":
            given = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "source"]
            named_ones = (node.value for node in tree.body if isinstance(node, ast.Assign))  # of several rules
            given += [value for value in named_ones if isinstance(value, ast.Constant)]
            plain |= {id(part) for source in given for part in ast.walk(source)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in plain)
        pages = [node.lineno for node in texts if re.search(r"docs/[a-z-]+\.md", str(node.value))]
        named += [f"{file.relative_to(ROOT)}:{line}" for line in pages]
    assert named == []
