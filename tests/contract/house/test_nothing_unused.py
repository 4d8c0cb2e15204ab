"""A function or class that only tests use is not part of the product: it is deleted, or moves to tests/support."""

import ast
import re
from collections import Counter

from tests.conftest import ROOT

FOLDERS = ("pipelines", "eval", "triton_repo", "scripts", "docker")
CALLED_BY_A_LIBRARY = {
    "ignore_aliases": "PyYAML asks its dumper",
    "on_start": "numba's event listener",
    "on_end": "numba's event listener",
    **dict.fromkeys(
        (
            *("compute_loss", "prediction_step", "_get_train_sampler"),
            *("save_model", "_load_from_checkpoint"),
            *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
            *("on_optimizer_step", "on_step_end", "on_evaluate", "on_log"),
        ),
        "Transformers' Trainer",
    ),
    **dict.fromkeys(("loglikelihood_rolling", "tokenizer_name"), "lm-eval's models have it"),
    **dict.fromkeys(("connection_made", "connection_lost", "data_received"), "asyncio's protocols"),
    **dict.fromkeys(
        ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
        "httptools' parser calls its protocol",
    ),
    "render_broken_contract": "import-linter's contract",
    "redirect_request": "urllib's openers ask their handler of redirects",
    "timeout_keep_alive_handler": "uvicorn's timer of an idle connection",
    "_repr_html_": "IPython shows a value by it",
}


def registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator hands it to a framework: a validator or serializer of pydantic, a handler of FastAPI."""
    return any(re.search(r"validator|serializer|exception_handler", ast.unparse(each)) for each in node.decorator_list)


def test_every_function_and_class_is_named_elsewhere_in_the_product():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "eval/tasks").rglob("*yaml"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    unused = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, text in sorted(texts.items())
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and words[node.name] == 1
        and node.name not in CALLED_BY_A_LIBRARY
        and not node.name.startswith("__")
        and not registered(node)
    ]
    assert unused == []
