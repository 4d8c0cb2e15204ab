"""Export: a Hugging Face checkpoint in, the files for a device that runs TensorRT Edge-LLM out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.checkpoint.unified import describe_unified, verify_unified
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes
from pipelines.engines.registry import EDGE
from pipelines.engines.tensorrt_edge.exporter import LLM, VERSION, export
from pipelines.engines.tensorrt_llm.config import BuildSettings
from triton_repo.llmapi import CHECKPOINT, checkpoint_files, link_files, tokenizer_files

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The exporter refuses a model without a chat template, as base models are."""
SERVERS_OWN = {"max_batch_size": 1, "max_input_len": 4096, "max_seq_len": 8192}
"""Limits where none are given: those of tensorrt-edgellm-serve 0.11.0."""


def device_commands(build: BuildSettings, positions: int | None) -> dict[str, str]:
    """Return title -> command, to be typed on the device in the folder of the export.

    Source: TensorRT Edge-LLM 0.11.0: its quick start guide for `llm_build` and `llm_inference`, which are compiled from
    source; the parsers of tensorrt-edgellm-build and tensorrt-edgellm-serve, which come with the wheel.

    Args:
        build: limits that are given hold; others are the server's own, as far as the model's positions reach.
        positions: longest sequence of the model, None if not known.
    """
    batch, prompt, total = (getattr(build, name) if build.given(name) else own for name, own in SERVERS_OWN.items())
    if positions is not None and not build.given("max_seq_len"):
        total = min(total, positions)
    prompt = min(prompt, total)
    camel = f"--maxBatchSize {batch} --maxInputLen {prompt} --maxKVCacheCapacity {total}"
    dashed = f"--max-batch-size {batch} --max-input-len {prompt} --max-kv-cache-capacity {total}"
    return {
        "build the engine from the graph, with the program of Edge-LLM's source": (
            f"llm_build --onnxDir {LLM} --engineDir engine {camel}"
        ),
        "run it": "llm_inference --engineDir engine --inputFile input.json --outputFile output.json",
        "install the wheel, which has no llm_build": f"python3 -m pip install 'tensorrt-edgellm[server]=={VERSION}'",
        "or build from the checkpoint, without the graph (experimental)": (
            f"tensorrt-edgellm-build --model-dir {CHECKPOINT} --engine-dir engine {dashed}"
        ),
        "or build so and serve, with an OpenAI API (experimental)": (
            f"tensorrt-edgellm-serve {CHECKPOINT} --host 127.0.0.1 {dashed}"
        ),
    }


@dataclass(frozen=True)
class ExportEdge:
    """Checkpoint and tokenizer in; `llm`, the graph that Edge-LLM's exporter writes, and `checkpoint`, links, out.

    Attributes:
        environment: of TensorRT Edge-LLM.
    """

    environment: Path
    name = "build"
    version = "1"
    measures = False
    writes = "engine"
    libraries: tuple[str, ...] = ()  # the exporter's environment is not this one
    needs: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """Return the exporter; the limits are the device's."""
        return {"engine": EDGE.name, "tensorrt-edgellm": VERSION}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{show_bytes(facts['engine_bytes'])}, {facts['tensors']} of {facts['tensors']} tensors read back"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Verify the checkpoint, export it, and read the graph back.

        Raises:
            UserError: the checkpoint is not valid; the environment is missing; the exporter failed, or left out or
                changed a tensor.
        """
        from pipelines.engines.tensorrt_edge.read_back import read_back  # numpy, which planning does not load

        source, tokenizer, checkpoint = inputs["checkpoint"], inputs["model"], out_dir / CHECKPOINT
        if faults := verify_unified(source):
            raise UserError.of(faults)
        link_files(tokenizer_files(tokenizer), tokenizer, checkpoint)
        link_files(checkpoint_files(source), source, checkpoint)  # its own config.json wins
        if not chat_templates(tokenizer)[0]:
            (checkpoint / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")
            progress.note("the model has no chat template: the texts of messages are joined as they are")
        listing = export(checkpoint, out_dir, self.environment, progress)
        files = [TensorFile(path) for path in sorted(checkpoint.glob("*.safetensors"))]
        if faults := read_back(files, listing, out_dir / LLM):
            raise UserError.of(faults)
        return {
            "engine_bytes": sum(path.stat().st_size for path in (out_dir / LLM).iterdir()),
            "tensors": sum(map(len, files)),
            "operators": sorted({f"{node['domain']}.{node['op']}" for node in listing["nodes"] if node["domain"]}),
            "exporter": VERSION,
            **describe_unified(checkpoint),
        }
