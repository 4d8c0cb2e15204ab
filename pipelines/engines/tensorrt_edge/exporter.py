"""Run TensorRT Edge-LLM's exporter in its own environment, on the CPU."""

import json
import os
import re
from pathlib import Path
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.progress import Progress
from pipelines.host.lifetimes import run_logged

VERSION = "0.11.0"
"""Of tensorrt-edgellm: the exporter, and what builds and serves on the device."""
SCRIPT = Path(__file__).with_name("export_graph.py")
LLM = "llm"
"""Folder of the graph in the exporter's output."""
LOG, LISTING = "export.log", "listing.json"
SKIPPED = re.compile(r"Loaded \d+ tensors, skipped (\d+)")


def python_of(environment: Path) -> Path:
    """Return the interpreter of Edge-LLM's environment; without resolving links, which would leave it."""
    return environment.absolute() / "bin" / "python"


def environment_fault(environment: Path) -> Fault | None:
    """Return what is wrong with Edge-LLM's environment; None if the exporter of the right version is there."""
    installed = sorted(environment.glob("lib/python3*/site-packages/tensorrt_edgellm-*.dist-info"))
    versions = [folder.name.removeprefix("tensorrt_edgellm-").removesuffix(".dist-info") for folder in installed]
    if python_of(environment).is_file() and versions == [VERSION]:
        return None
    has = f"has tensorrt-edgellm {', '.join(versions)}" if versions else "is no environment of TensorRT Edge-LLM"
    return Fault(
        f"engine=tensorrt_edge needs tensorrt-edgellm {VERSION}, and paths.edge='{environment}' {has}.",
        "Its packages differ from this project's, so it has an environment of its own.",
        "Run: make setup-edge",
    )


def export(checkpoint: Path, out_dir: Path, environment: Path, progress: Progress) -> dict[str, Any]:
    """Export a checkpoint to an ONNX graph.

    Returns:
        the listing of the graph, see export_graph.py.

    Raises:
        UserError: the environment is missing or another version, or the exporter failed.
    """
    if fault := environment_fault(environment):
        raise UserError.of([fault])
    out_dir.mkdir(parents=True, exist_ok=True)
    log, listing = out_dir / LOG, out_dir / LISTING
    command = [str(python_of(environment)), str(SCRIPT), str(checkpoint), str(out_dir), str(listing)]
    # the environment's own packages, and no look at the Hub
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**own, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with progress.task("exporting", None):
        lines = run_logged(command, title="tensorrt-edgellm-export", env=env, cwd=out_dir, log_file=log, writes=listing)
    graph: dict[str, Any] = json.loads(listing.read_text(encoding="utf-8"))
    graph["skipped"] = sum(map(int, SKIPPED.findall("\n".join(lines))))
    for file in (log, listing):  # with times and paths in them
        file.unlink()
    return graph
