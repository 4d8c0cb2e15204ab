"""One pipeline for the model, and one for the model with each LoRA adapter.

openvino_genai gives all sequences of a pipeline the same weights, so each adapter has a pipeline, with its own copy of
the compiled model and its own KV cache; the scheduler steps those that have work in turn. KV caches are virtual memory
until their blocks are first used. Settings of sequences are translated for it, and an iteration's output is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import openvino as ov
import openvino_genai as genai

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.memory import blocks_of
from pipelines.engines.openvino.pipeline import finite, open_pipeline, open_table
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions, kv_blocks
from pipelines.engines.openvino.sequences import Sequence, StepOutput, nothing_more
from pipelines.engines.openvino.serving_stats import KvLedger

_STATUS = genai.GenerationStatus
_STOP = genai.GenerationFinishReason.STOP

TOO_SMALL = "The KV cache is too small for the request. Raise max_tokens_in_paged_kv_cache or openvino_kv_cache_bytes."


def pipeline_config(sequence: Sequence) -> genai.GenerationConfig:
    """Translate a request to openvino_genai's settings.

    Raises:
        RuntimeError: the engine rejects the combination of options.
    """
    request = sequence.request
    config = genai.GenerationConfig()
    config.max_new_tokens = request.max_tokens
    # genai requires an end token: if the request has none, genai gets one and ignores it
    config.ignore_eos = request.end_id < 0
    config.eos_token_id = max(0, request.end_id)
    config.stop_token_ids = {config.eos_token_id}
    config.min_new_tokens = request.min_tokens if request.end_id >= 0 else 0
    config.repetition_penalty = request.repetition_penalty
    config.presence_penalty, config.frequency_penalty = request.presence_penalty, request.frequency_penalty
    config.logprobs = int(request.log_probs)
    if sequence.draft.per_iteration:
        config.num_assistant_tokens = sequence.draft.per_iteration
    if request.beam_width > 1:
        config.num_beams = config.num_return_sequences = request.beam_width
        config.length_penalty = request.length_penalty
        config.stop_criteria = genai.StopCriteria.EARLY if request.early_stopping else genai.StopCriteria.HEURISTIC
        return config
    config.do_sample = request.samples
    if request.samples:
        config.temperature, config.rng_seed = request.temperature, sequence.seed()
        config.top_p = request.top_p or 1.0
        if request.top_k:
            config.top_k = request.top_k
    return config


def read(sequence: Sequence, now: int) -> StepOutput | None:
    """Return the new output of a sequence after an iteration, or None."""
    status = sequence.handle.get_status()
    if status == _STATUS.RUNNING:
        return _running(sequence, now)
    if status == _STATUS.IGNORED:
        return nothing_more(sequence, TOO_SMALL)
    stamps = sequence.stamps
    stamps.first_token, stamps.last_token = stamps.first_token or now, now
    if sequence.request.beam_width > 1:
        return _best_beams(sequence)
    outputs = sequence.handle.read_all()
    step = _step_output(sequence, outputs[0]) if outputs else StepOutput()
    _cut_at_stop_word(sequence, step)
    step.ended = True
    return _complete(sequence, step)


def abandon(sequence: Sequence) -> StepOutput:
    """Cancel a sequence; return its final output with the tokens so far. Afterwards the handle cannot be read."""
    if sequence.request.beam_width > 1:
        sequence.handle.cancel()
        return nothing_more(sequence)
    step = StepOutput()
    # not read_all: for a running sequence it waits for the rest, which only this thread could produce
    while sequence.handle.can_read():
        step.add(_step_output(sequence, next(iter(sequence.handle.read().values()))))
    sequence.handle.cancel()
    step.ended = True
    return _complete(sequence, step)


def _running(sequence: Sequence, now: int) -> StepOutput | None:
    """Read the new tokens of a single sequence and look for stop words in them."""
    handle, stamps, request = sequence.handle, sequence.stamps, sequence.request
    if request.beam_width > 1 or not handle.can_read():
        return None
    stamps.first_token = stamps.first_token or now
    if not request.streaming and not request.stop_words and not sequence.draft.per_iteration:
        return None
    stamps.last_token = now
    step = _step_output(sequence, next(iter(handle.read().values())))
    if _cut_at_stop_word(sequence, step):
        handle.stop()
        step.ended = True
    return _complete(sequence, step) if step.ended or sequence.streams_tokens else None


def _cut_at_stop_word(sequence: Sequence, step: StepOutput) -> bool:
    """Cut after a stop word that ends within the new tokens, and return whether there was one.

    With a draft model, more tokens may have followed it.
    """
    end = sequence.stop_word_end(len(step.rows[0]))
    if end is None:
        return False
    too_many = len(sequence.tokens) - end
    if too_many:
        del sequence.tokens[-too_many:], step.rows[0][-too_many:]
        if sequence.request.log_probs:
            sequence.cum -= sum(step.log_probs[0][-too_many:])
            del sequence.log_probs[-too_many:], step.log_probs[0][-too_many:]
            step.cum = [sequence.cum]
    return True


def _step_output(sequence: Sequence, output: Any) -> StepOutput:
    tokens = list(output.generated_ids)
    sequence.draft.iteration(len(tokens), sequence.request.max_tokens)
    if output.finish_reason == _STOP and tokens and tokens[-1] == sequence.request.end_id:
        tokens.pop()
    step = StepOutput([tokens])
    if sequence.request.log_probs:
        step.log_probs = [list(output.generated_log_probs)[: len(tokens)]]
        sequence.log_probs += step.log_probs[0]
        sequence.cum += sum(step.log_probs[0])
        step.cum = [sequence.cum]
    sequence.tokens += tokens
    return step


def _complete(sequence: Sequence, step: StepOutput) -> StepOutput:
    if not sequence.streams_tokens:
        step.rows, step.log_probs = [sequence.tokens], [sequence.log_probs]
    return step


def _best_beams(sequence: Sequence) -> StepOutput:
    request = sequence.request
    outputs = sorted(sequence.handle.read_all(), key=lambda output: output.score, reverse=True)
    step = StepOutput([], [], ended=True)
    for output in outputs[: request.num_return_sequences or request.beam_width]:
        tokens = list(output.generated_ids)
        if tokens and tokens[-1] == request.end_id:
            tokens.pop()
        step.rows.append(tokens)
        step.log_probs.append(list(output.generated_log_probs)[: len(tokens)])
        step.cum.append(sum(step.log_probs[-1]))
    sequence.tokens = step.rows[0]
    return step


class AdapterPipeline:
    """The pipeline of the model, or of the model with one LoRA adapter, and the KV blocks reserved in it."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        self.folder, self.options = folder, options
        self.max_blocks = kv_blocks(folder, options)
        self._pipeline = open_pipeline(folder, options)
        self._table = open_table(folder, options, self._pipeline)
        self._eviction = options.eviction(folder.limits.max_seq_len)
        self._ledger = KvLedger(self.max_blocks, reuse=options.enable_prefix_caching)
        self._guesses = options.num_draft_tokens if options.draft_dir is not None else 0
        self._reserved = 0

    def fits(self, request: GenerationRequest) -> bool:
        """Return whether all blocks that a request may need are free; one request always fits into an empty cache."""
        return not self._reserved or self._reserved + self._blocks_at_most(request) <= self.max_blocks

    def has_rows(self, request: GenerationRequest) -> bool:
        """Return whether the prompt table has room for the request's rows."""
        return self._table is None or request.table is None or self._table.fits(request.table)

    def reserve(self, request: GenerationRequest) -> None:
        """Reserve the blocks of a sequence, and put its rows into the prompt table."""
        self._reserved += self._blocks_at_most(request)
        if self._table is not None and request.table is not None:
            self._table.take(request.table)

    def start(self, sequence: Sequence, number: int) -> None:
        """Start a sequence.

        Raises:
            RuntimeError: the engine rejects the combination of options.
        """
        sequence.draft.per_iteration = self._guesses
        request = sequence.request
        if self._table is not None and request.table is not None:
            sequence.engine_prompt = self._table.ids(request.prompt, request.table)
        prompt = ov.Tensor(sequence.engine_prompt.reshape(1, -1))
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
        if self._table is not None and request.table is not None:
            self._table.release(request.table)

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
            UserError: see `pipeline.open_pipeline` and `lora.apply_adapter`; or the engine has a prompt table and
                there are adapters or a draft model.
        """
        rows, others = folder.limits.max_prompt_embedding_table_size, [*map(str, adapters), options.draft_dir or ""]
        if rows and any(others):
            raise UserError(
                f"The engine {folder.path} has a prompt table (max_prompt_embedding_table_size={rows}), which a draft"
                " model or LoRA adapters cannot read.",
                todo="Load it without them, or build it without a table.",
            )
        self._by_task: dict[int | None, AdapterPipeline] = {None: AdapterPipeline(folder, options)}
        # the draft model is meant for the model without an adapter
        plain = options.model_copy(update={"draft_dir": None})
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
