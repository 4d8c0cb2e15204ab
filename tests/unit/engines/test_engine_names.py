"""What differs between engines is asked of their descriptions: no code outside them compares an engine's name."""

import ast
from collections.abc import Iterator
from pathlib import Path

from pipelines.engines.registry import ENGINES

ROOT = Path(__file__).resolve().parents[3]
NAMES = {name for engine in ENGINES.values() for name in (engine.name, engine.setting)}
MAY_KNOW_NAMES = ("pipelines/engines", "pipelines/settings")
ALLOWED = {
    ("pipelines/deploy/migrate/sources.py", "tensorrt_llm"): "a model in NVIDIA's Triton repository",
    ("pipelines/deploy/migrate/translate.py", "tensorrt_llm"): "a model in NVIDIA's Triton repository",
    ("pipelines/doctor/versions.py", "openvino"): "a Python distribution",
    ("pipelines/doctor/versions.py", "tensorrt_llm"): "a column of compatibility.json",
}
"""(file, word) -> what the word is there, if not an engine."""


def compared(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that decide something by their value: comparisons, matches, keys and beginnings of words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.MatchValue):
            yield node.value
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            yield from node.args


def words(expression: ast.expr) -> set[str]:
    """String literals of an expression: itself, or the members of a tuple, list or set."""
    members = expression.elts if isinstance(expression, ast.Tuple | ast.List | ast.Set) else [expression]
    return {node.value for node in members if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def found_in(source: str) -> set[str]:
    return {word for expression in compared(ast.parse(source)) for word in words(expression)} & NAMES


def test_no_engine_is_told_by_its_name_outside_engines_and_settings() -> None:
    files = [path for room in ("pipelines", "eval", "triton_repo") for path in (ROOT / room).rglob("*.py")]
    places = {path.relative_to(ROOT).as_posix(): path for path in files}
    found = {
        (place, word)
        for place, path in places.items()
        if not place.startswith(MAY_KNOW_NAMES)
        for word in found_in(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "no longer there, so no longer to be allowed"


def test_the_search_sees_every_kind_of_comparison() -> None:
    for source in (
        "name == 'openvino'",
        "'llmapi' != name",
        "name in ('openvino', 'x')",
        "{'tensorrt_llm': 1}[name]",
        "table['openvino']",
        "name.startswith('tensorrt_llm')",
        "match name:\n    case 'openvino': pass",
    ):
        assert found_in(source), source
    assert found_in("describe('openvino')") == set()
