"""Runtimes of a Hugging Face checkpoint: a folder for TensorRT-LLM's LLM API, or files for a device with Edge-LLM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.checkpoint.unified import (
    QUANT_CONFIG,
    describe_unified,
    same_vocabulary,
    unscaled_inputs,
    verify_unified,
)
from pipelines.compress.config import KvCacheSettings
from pipelines.domain.errors import refuse
from pipelines.domain.formats import KvFormat
from pipelines.domain.progress import Progress
from pipelines.domain.units import show_bytes
from pipelines.engines.registry import EDGE, LLM_API
from pipelines.engines.tensorrt_edge.exporter import LLM, VERSION, export
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.engines.tensorrt_llm.llm_api import merged
from triton_repo.config import TritonSettings
from triton_repo.llmapi import CHECKPOINT, DRAFT, OPTIONS, checkpoint_files, link_files, read_arguments, tokenizer_files

SCALES = "pre_quant_scale.safetensors"


@dataclass(frozen=True)
class ConfigureLlm:
    """Checkpoint, tokenizer and optional draft in, a folder of hard links with the arguments of the LLM API out.

    TensorRT-LLM 1.3 and later has no engines: this folder takes an engine's place, and
    `trtllm-serve checkpoint --extra_llm_api_options extra_llm_api_options.yaml` runs it.

    Attributes:
        triton: KV pool, scheduler, guided decoding.
        kv_cache: element type and reuse of the KV cache.
        enable_chunked_context: split prompts longer than max_num_tokens.
        num_draft_tokens: tokens that a draft model guesses at a time; the input `draft` is its checkpoint.
        draft_word: what the TensorRT-LLM that will read the arguments calls a draft model.
        others: options without a setting of their own, by NVIDIA's names; they win.
    """

    build: BuildSettings
    triton: TritonSettings
    kv_cache: KvCacheSettings
    enable_chunked_context: bool
    num_draft_tokens: int | None = None
    draft_word: Literal["DraftTarget", "Draft_Target"] = "Draft_Target"
    others: Mapping[str, Any] = field(default_factory=dict)
    name = "build"
    version = "1"
    measures = False
    writes = "engine"
    libraries: tuple[str, ...] = ()  # text and links
    needs: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `tensorrt_llm.LLM`, except the checkpoint; what is left out has NVIDIA's default."""
        build, triton = self.build, self.triton
        pool = {
            "enable_block_reuse": self.kv_cache.enable_block_reuse,
            "max_tokens": triton.max_tokens_in_paged_kv_cache,
            "max_attention_window": triton.max_attention_window_size and list(triton.max_attention_window_size),
            "free_gpu_memory_fraction": triton.kv_cache_free_gpu_mem_fraction,
            "host_cache_size": triton.kv_cache_host_memory_bytes or None,
            "dtype": "fp8" if self.kv_cache.dtype == KvFormat.FP8 else "auto",
            "tokens_per_block": build.tokens_per_block,
        }
        limits = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
        own = {
            "tensor_parallel_size": build.tp_size,
            "pipeline_parallel_size": build.pp_size,
            **{name: getattr(build, name) for name in limits},
            "enable_chunked_prefill": self.enable_chunked_context,
            "guided_decoding_backend": triton.guided_decoding_backend,
            "kv_cache_config": {name: value for name, value in pool.items() if value is not None},
            "scheduler_config": {"capacity_scheduler_policy": triton.batch_scheduler_policy.upper()},
            "speculative_config": self.num_draft_tokens
            and {
                "decoding_type": self.draft_word,
                "max_draft_len": self.num_draft_tokens,
                "speculative_model": DRAFT,
            },
        }
        return merged({name: value for name, value in own.items() if value is not None}, self.others)

    def identity(self) -> dict[str, Any]:
        """Return everything that is written."""
        return {"engine": LLM_API.name, "arguments": self.arguments}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return show_bytes(facts["engine_bytes"])

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Verify the checkpoint, link it, write the arguments and read them back."""
        source, tokenizer, draft = inputs["checkpoint"], inputs["model"], inputs.get("draft")
        faults = [*verify_unified(source), *(verify_unified(draft) if draft else ())]
        if not faults and draft:
            faults = same_vocabulary(source, draft)
        refuse(faults)
        if draft:
            link_files(checkpoint_files(draft), draft, out_dir / DRAFT)
            _add_unit_scales(out_dir / DRAFT)
        link_files(tokenizer_files(tokenizer), tokenizer, out_dir / CHECKPOINT)
        link_files(checkpoint_files(source), source, out_dir / CHECKPOINT)  # its own config.json wins
        _add_unit_scales(out_dir / CHECKPOINT)
        path = out_dir / OPTIONS
        path.write_text(yaml.safe_dump(self.arguments, sort_keys=False), encoding="utf-8")
        if read_arguments(path) != self.arguments:
            raise RuntimeError(f"{path} differs from what was requested")
        facts = describe_unified(out_dir / CHECKPOINT)
        return {"engine_bytes": facts["total_bytes"], "arguments": self.arguments, **facts}


ONES = {"BF16": b"\x80\x3f", "F16": b"\x00\x3c"}
"""The number 1, by type."""


def _add_unit_scales(folder: Path) -> None:
    """Give INT4 linears without AWQ scales for their inputs that are 1, which TensorRT-LLM's loader needs."""
    dtype, widths = unscaled_inputs(folder)
    if not widths:
        return
    ends = [0, *accumulate(2 * width for width in widths.values())]
    header = {
        name: {"dtype": dtype, "shape": [width], "data_offsets": [start, end]}
        for (name, width), (start, end) in zip(widths.items(), pairwise(ends), strict=True)
    }
    text = json.dumps(header).encode()
    (folder / SCALES).write_bytes(len(text).to_bytes(8, "little") + text + ONES[dtype] * (ends[-1] // 2))
    path = folder / QUANT_CONFIG
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization"]["pre_quant_scale"] = True
    path.unlink()  # a link to the checkpoint's own
    path.write_text(json.dumps(content, indent=4), encoding="utf-8")


# For a device that runs TensorRT Edge-LLM.

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The exporter refuses a model without a chat template, as base models are."""
SERVERS_OWN = {"max_batch_size": 1, "max_input_len": 4096, "max_seq_len": 8192}
"""Limits where none are given: those of tensorrt-edgellm-serve 0.11.0."""


def device_commands(
    build: BuildSettings, positions: int | None, host: str = "127.0.0.1", port: int | None = None
) -> dict[str, str]:
    """Return title -> command, to be typed on the device in the folder of the export.

    Source: TensorRT Edge-LLM 0.11.0: its quick start guide for `llm_build` and `llm_inference`, which are compiled from
    source; the parsers of tensorrt-edgellm-build and tensorrt-edgellm-serve, which come with the wheel.

    Args:
        build: limits that are given hold; others are the server's own, as far as the model's positions reach.
        positions: longest sequence of the model, None if not known.
        host: address that the server listens on.
        port: of the server; None is its own, 8000.
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
            f"tensorrt-edgellm-serve {CHECKPOINT} --host {host}{f' --port {port}' if port else ''} {dashed}"
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
        refuse(verify_unified(source))
        link_files(tokenizer_files(tokenizer), tokenizer, checkpoint)
        link_files(checkpoint_files(source), source, checkpoint)  # its own config.json wins
        if not chat_templates(tokenizer)[0]:
            (checkpoint / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")
            progress.note("the model has no chat template: the texts of messages are joined as they are")
        listing = export(checkpoint, out_dir, self.environment, progress)
        files = [TensorFile(path) for path in sorted(checkpoint.glob("*.safetensors"))]
        refuse(read_back(files, listing, out_dir / LLM))
        return {
            "engine_bytes": sum(path.stat().st_size for path in (out_dir / LLM).iterdir()),
            "tensors": sum(map(len, files)),
            "operators": sorted({f"{node['domain']}.{node['op']}" for node in listing["nodes"] if node["domain"]}),
            "exporter": VERSION,
            **describe_unified(checkpoint),
        }
