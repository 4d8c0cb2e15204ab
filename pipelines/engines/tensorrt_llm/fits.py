"""Check an engine against this machine: it runs only on the GPU generation and under the versions that built it.

Source: TensorRT's "engine plan file is not compatible" and "expecting compute 8.0 got 8.9": tensorrtllm_backend issues
194, 424 and 531, TensorRT-LLM issues 1695 and 1838, llama_index issue 12318.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from pipelines.domain.errors import Fault
from pipelines.engines.tensorrt_llm.folder import CONFIG, BuiltOn
from pipelines.host.files import MANIFEST
from pipelines.host.machine import gather


def fit_faults(engine_dir: Path) -> list[Fault]:
    """Compare an engine with this machine's GPU, TensorRT and TensorRT-LLM; unknown values are skipped."""
    gpus = gather().gpus
    here = BuiltOn.here(gpus[0].name if gpus else "", gpus[0].sm if gpus else 0.0)
    return list(_faults(engine_dir, here))


def _faults(engine_dir: Path, here: BuiltOn) -> Iterator[Fault]:
    built = BuiltOn.load(engine_dir)
    version = json.loads((engine_dir / CONFIG).read_text(encoding="utf-8")).get("version")
    pairs = [("TensorRT-LLM", str(version) if version else "absent", here.tensorrt_llm)]
    if built is not None:
        pairs.append(("TensorRT", built.tensorrt, here.tensorrt))
        if here.gpu and built.sm != here.sm:
            yield Fault(
                f"The engine '{engine_dir}' was built on {built.gpu} (compute capability {built.sm:g}); "
                f"this machine has {here.gpu} ({here.sm:g}).",
                "A TensorRT engine runs only on the compute capability it was built on.",
                *_rebuild(engine_dir),
            )
    for tool, then, now in pairs:
        if then != now and "absent" not in (then, now):
            yield Fault(
                f"The engine '{engine_dir}' was built by {tool} {then}; this machine has {tool} {now}.",
                "An engine runs only under the versions that built it.",
                *_rebuild(engine_dir),
            )


def _rebuild(engine_dir: Path) -> tuple[str, tuple[str, ...]]:
    """Return what to do and the command that made the engine or its repository; here it makes another one.

    A repository has its engine in `<model>/<version>/engine` and its manifest at the top.
    """
    for folder in (engine_dir, *engine_dir.absolute().parents[2:3]):
        if (manifest := folder / MANIFEST).is_file():
            return "Build it here:", tuple(shlex.split(json.loads(manifest.read_text(encoding="utf-8"))["repeat"]))
    return "Build it here: make build engine=tensorrt_llm, with the same overrides.", ()
