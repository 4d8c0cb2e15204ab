"""A stage whose code changed must be looked at: does it still write the same bytes?

The golden file holds each stage's version and a digest of its code (docstrings and comments left out). When this test
fails, raise the stage's `version` if the bytes change, then run `make golden`; if they do not, `make golden` alone.
"""

import ast
import hashlib
import json
from pathlib import Path

from pipelines.stages.build import Build
from pipelines.stages.download import Download
from pipelines.stages.evaluate import Evaluate, EvaluateSequentially
from pipelines.stages.fidelity import Fidelity
from pipelines.stages.prune_model import PruneModel
from pipelines.stages.quantize import Quantize
from pipelines.stages.recover import Recover
from pipelines.stages.repository import WriteRepository
from pipelines.stages.sparsify import Sparsify
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "stage_versions.json"
READER = [f"pipelines/checkpoint/{name}.py" for name in ("config_json", "read", "tensors")]
OPENVINO = "pipelines/engines/openvino"
BUILDER = [f"{OPENVINO}/{name}.py" for name in ("build", "graph", "lora", "rope", "weights")]
SCORER = [f"{OPENVINO}/{name}.py" for name in ("engine", "precision", "runtime", "scoring")]
CODE = {
    Download: ["pipelines/hub", "pipelines/stages/download.py"],
    PruneModel: ["pipelines/compress", "pipelines/stages/prune_model.py"],
    Sparsify: ["pipelines/compress", "pipelines/stages/sparsify.py"],
    Recover: ["pipelines/compress", "pipelines/stages/recover.py"],
    Quantize: ["pipelines/compress", "pipelines/stages/quantize.py"],
    Build: [
        *BUILDER,
        "pipelines/engines/tensorrt_llm",
        "pipelines/checkpoint/read.py",
        "pipelines/stages/build.py",
        *READER,
    ],
    WriteRepository: ["triton_repo", "pipelines/stages/repository.py"],
    Evaluate: ["eval", *SCORER, "pipelines/stages/evaluate.py"],
    EvaluateSequentially: ["eval", *SCORER, "pipelines/stages/evaluate.py"],
    Fidelity: [
        *("eval/adapter.py", "eval/fidelity", *SCORER, f"{OPENVINO}/teacher_forcing.py"),
        *("pipelines/compress/texts.py", "pipelines/stages/fidelity.py"),
    ],
}


def code_digest(places: list[str]) -> str:
    """Digest of all Python code below some places, blind to comments, docstrings and layout."""
    digest = hashlib.sha256()
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if "models" in file.relative_to(ROOT).parts[:2]:  # copied into the artifact and so in its key
                continue
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                first = body[0] if isinstance(body, list) and body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = body[1:]
            digest.update(f"{file.relative_to(ROOT)}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:16]


def test_code_of_a_stage_changed_only_with_a_decision(request):
    found = {stage.__name__: {"version": stage.version, "code": code_digest(places)} for stage, places in CODE.items()}
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert json.loads(GOLDEN.read_text()) == found
