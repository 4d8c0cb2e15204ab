"""A class name has one meaning in the whole project, so that a reader who meets it knows which class it is."""

import ast
from collections import defaultdict

from tests.conftest import ROOT

SHARED = {"TritonPythonModel"}  # the name that Triton's Python backend looks for in every model.py


def test_no_class_name_is_defined_twice():
    places = defaultdict(list)
    for package in ("pipelines", "eval", "triton_repo"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED} == {}
