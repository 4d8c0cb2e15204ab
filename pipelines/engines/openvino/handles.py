"""Sequences in openvino_genai's pipeline: translate their settings, and read the output of an iteration."""

from __future__ import annotations

from typing import Any

import openvino_genai as genai

from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.sequences import Sequence, StepOutput

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
        _beams(config, request)
    else:
        _sampling(config, sequence)
    return config


def _beams(config: genai.GenerationConfig, request: GenerationRequest) -> None:
    config.num_beams = config.num_return_sequences = request.beam_width
    config.length_penalty = request.length_penalty
    config.stop_criteria = genai.StopCriteria.EARLY if request.early_stopping else genai.StopCriteria.HEURISTIC


def _sampling(config: genai.GenerationConfig, sequence: Sequence) -> None:
    request = sequence.request
    config.do_sample = request.samples
    if request.samples:
        config.temperature, config.rng_seed = request.temperature, sequence.seed()
        config.top_p = request.top_p or 1.0
        if request.top_k:
            config.top_k = request.top_k


def nothing_more(sequence: Sequence, error: str = "") -> StepOutput:
    """Return the final output of a sequence, without further tokens."""
    beams = sequence.request.beam_width
    return StepOutput([[] for _ in range(beams)], [[] for _ in range(beams)], ended=True, error=error)


class HandleReader:
    """Turns the output of a handle after an iteration into a `StepOutput`."""

    def read(self, sequence: Sequence, now: int) -> StepOutput | None:
        """Return the new output, or None.

        Args:
            sequence: a sequence with a handle.
            now: when the iteration ended, ns.
        """
        handle = sequence.handle
        status = handle.get_status()
        if status == _STATUS.RUNNING:
            return self._running(sequence, now)
        if status == _STATUS.IGNORED:
            return nothing_more(sequence, TOO_SMALL)
        return self._finished(sequence, now)

    def abandon(self, sequence: Sequence) -> StepOutput:
        """Cancel a sequence; return its final output with the tokens so far. Afterwards the handle cannot be read."""
        if sequence.request.beam_width > 1:
            sequence.handle.cancel()
            return nothing_more(sequence)
        step = StepOutput()
        # not read_all: for a running sequence it waits for the rest, which only this thread could produce
        while sequence.handle.can_read():
            step.add(self._step_output(sequence, next(iter(sequence.handle.read().values()))))
        sequence.handle.cancel()
        step.ended = True
        return self._complete(sequence, step)

    def _running(self, sequence: Sequence, now: int) -> StepOutput | None:
        stamps, request = sequence.stamps, sequence.request
        if request.beam_width > 1:
            return None
        if not request.streaming and not request.stop_words and not sequence.draft.per_iteration:
            if not stamps.first_token and sequence.handle.can_read():
                stamps.first_token = now
            return None
        return self._take(sequence, now)

    def _take(self, sequence: Sequence, now: int) -> StepOutput | None:
        """Read the new tokens of a single sequence and look for stop words in them."""
        handle, stamps = sequence.handle, sequence.stamps
        if not handle.can_read():
            return None
        output = next(iter(handle.read().values()))
        stamps.first_token = stamps.first_token or now
        stamps.last_token = now
        step = self._step_output(sequence, output)
        if self._cut_at_stop_word(sequence, step):
            handle.stop()
            step.ended = True
        if step.ended or sequence.streams_tokens:
            return self._complete(sequence, step)
        return None

    def _finished(self, sequence: Sequence, now: int) -> StepOutput:
        stamps = sequence.stamps
        stamps.first_token, stamps.last_token = stamps.first_token or now, now
        if sequence.request.beam_width > 1:
            return _best_beams(sequence)
        outputs = sequence.handle.read_all()
        step = self._step_output(sequence, outputs[0]) if outputs else StepOutput()
        self._cut_at_stop_word(sequence, step)
        step.ended = True
        return self._complete(sequence, step)

    def _cut_at_stop_word(self, sequence: Sequence, step: StepOutput) -> bool:
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

    def _step_output(self, sequence: Sequence, output: Any) -> StepOutput:
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

    def _complete(self, sequence: Sequence, step: StepOutput) -> StepOutput:
        """Give a request that is not streamed all its tokens at once."""
        if not sequence.streams_tokens:
            step.rows, step.log_probs = [sequence.tokens], [sequence.log_probs]
        return step


def _best_beams(sequence: Sequence) -> StepOutput:
    """Rank the beams by their score."""
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
