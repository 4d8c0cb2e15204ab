"""One pipeline for the model, and one for the model with each LoRA adapter.

openvino_genai gives all sequences of a pipeline the same weights, so each adapter has a pipeline, with its own copy of
the compiled model and its own KV cache; the scheduler steps those that have work in turn. KV caches are virtual memory
until their blocks are first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import openvino as ov

from pipelines.engines.openvino.blocks import blocks_of
from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.handles import pipeline_config
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.pipeline import finite, open_pipeline
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_blocks
from pipelines.engines.openvino.sequences import Sequence
from pipelines.engines.openvino.serving_stats import KvLedger


class AdapterPipeline:
    """The pipeline of the model, or of the model with one LoRA adapter, and the KV blocks reserved in it."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        """Load the model."""
        self.folder, self.options = folder, options
        self.max_blocks = kv_blocks(folder, options)
        self._pipeline = open_pipeline(folder, options)
        self._eviction = options.eviction(folder.limits.max_seq_len)
        self._ledger = KvLedger(self.max_blocks, reuse=options.enable_prefix_caching)
        self._guesses = options.num_draft_tokens if options.draft_dir is not None else 0
        self._reserved = 0

    def fits(self, request: GenerationRequest) -> bool:
        """Return whether all blocks that a request may need are free; one request always fits into an empty cache."""
        return not self._reserved or self._reserved + self._blocks_at_most(request) <= self.max_blocks

    def reserve(self, request: GenerationRequest) -> None:
        """Reserve the blocks of a sequence."""
        self._reserved += self._blocks_at_most(request)

    def start(self, sequence: Sequence, number: int) -> None:
        """Start a sequence.

        Raises:
            RuntimeError: the engine rejects the combination of options.
        """
        sequence.draft.per_iteration = self._guesses
        prompt = ov.Tensor(sequence.request.prompt.reshape(1, -1))
        sequence.handle = self._pipeline.add_request(number, prompt, pipeline_config(sequence))
        self._ledger.start(sequence)

    def step(self) -> None:
        """Run one iteration.

        Raises:
            NotFiniteError: the logits of a sequence that asks for log probabilities are NaN.
        """
        with finite():
            self._pipeline.step()

    def release(self, sequence: Sequence) -> None:
        """Release the reservation of a sequence that ran."""
        self.forget(sequence.request)
        self._ledger.end(sequence)

    def forget(self, request: GenerationRequest) -> None:
        """Release the reservation of a sequence that did not start."""
        self._reserved -= self._blocks_at_most(request)

    @property
    def used_blocks(self) -> float:
        """Blocks in use at the last iteration."""
        return float(self._pipeline.get_metrics().cache_usage) / 100 * self.max_blocks

    def _blocks_at_most(self, request: GenerationRequest) -> int:
        prompt, new = len(request.prompt), request.max_tokens
        per_beam = self._eviction.blocks_at_most(prompt, new) if self._eviction else blocks_of(prompt + new)
        return per_beam * request.beam_width


class AdapterPipelines:
    """All pipelines of a server."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions, adapters: Mapping[int, LoraAdapter]) -> None:
        """Load the model, and the model with each adapter (LoRA task id -> adapter).

        Raises:
            UserError: see `pipeline.open_pipeline` and `lora.apply_adapter`.
        """
        self._by_task: dict[int | None, AdapterPipeline] = {None: AdapterPipeline(folder, options)}
        plain = options.model_copy(
            update={"draft_dir": None}
        )  # the draft model is meant for the model without an adapter
        for task, adapter in adapters.items():
            self._by_task[task] = AdapterPipeline(replace(folder, adapter=adapter), plain)

    def of(self, request: GenerationRequest) -> AdapterPipeline:
        """Return the pipeline that runs a request."""
        return self._by_task[request.lora_task_id]

    def busy(self, running: Iterable[Sequence]) -> list[AdapterPipeline]:
        """Return the pipelines that have work."""
        tasks = {sequence.request.lora_task_id for sequence in running}
        return [pipeline for task, pipeline in self._by_task.items() if task in tasks]

    @property
    def max_blocks(self) -> int:
        """Total number of KV blocks."""
        return sum(pipeline.max_blocks for pipeline in self._by_task.values())

    def cache_percent(self, running: Iterable[Sequence]) -> float:
        """Return the percentage of all blocks in use; an idle pipeline would report that of its last iteration."""
        return 100 * sum(pipeline.used_blocks for pipeline in self.busy(running)) / self.max_blocks
