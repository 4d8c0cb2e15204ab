"""One sequence in openvino_genai's pipeline: its settings, and what an iteration brought."""

from __future__ import annotations

from typing import Any

import openvino_genai as genai

from pipelines.engines.openvino.generation_request import Asked
from pipelines.engines.openvino.sequences import News, Stream

_STATUS = genai.GenerationStatus
_STOP = genai.GenerationFinishReason.STOP

TOO_SMALL = "The KV cache is too small for the request. Raise max_tokens_in_paged_kv_cache or openvino_kv_cache_bytes."


def pipeline_config(stream: Stream) -> genai.GenerationConfig:
    """Translate what was asked.

    Raises:
        RuntimeError: the engine refuses the combination.
    """
    asked = stream.asked
    config = genai.GenerationConfig()
    config.max_new_tokens = asked.max_tokens
    # genai always wants an end token: without one it is told to ignore the one it gets
    config.ignore_eos = asked.end_id < 0
    config.eos_token_id = max(0, asked.end_id)
    config.stop_token_ids = {config.eos_token_id}
    config.min_new_tokens = asked.min_tokens if asked.end_id >= 0 else 0
    config.repetition_penalty = asked.repetition_penalty
    config.presence_penalty, config.frequency_penalty = asked.presence_penalty, asked.frequency_penalty
    config.logprobs = int(asked.log_probs)
    if stream.draft.per_iteration:
        config.num_assistant_tokens = stream.draft.per_iteration
    if asked.beam_width > 1:
        _beams(config, asked)
    else:
        _sampling(config, stream)
    return config


def _beams(config: genai.GenerationConfig, asked: Asked) -> None:
    config.num_beams = config.num_return_sequences = asked.beam_width
    config.length_penalty = asked.length_penalty
    config.stop_criteria = genai.StopCriteria.EARLY if asked.early_stopping else genai.StopCriteria.HEURISTIC


def _sampling(config: genai.GenerationConfig, stream: Stream) -> None:
    asked = stream.asked
    config.do_sample = asked.samples
    if asked.samples:
        config.temperature, config.rng_seed = asked.temperature, stream.seed()
        config.top_p = asked.top_p or 1.0
        if asked.top_k:
            config.top_k = asked.top_k


def nothing_more(stream: Stream, error: str = "") -> News:
    """Return the end of a sequence without further tokens."""
    beams = stream.asked.beam_width
    return News([[] for _ in range(beams)], [[] for _ in range(beams)], ended=True, error=error)


class Reader:
    """Turns what a handle offers after an iteration into news."""

    def read(self, stream: Stream, now: int) -> News | None:
        """Return what is new, or None.

        Args:
            stream: with a handle.
            now: when the iteration ended, ns.
        """
        handle = stream.handle
        status = handle.get_status()
        if status == _STATUS.RUNNING:
            return self._running(stream, now)
        if status == _STATUS.IGNORED:
            return nothing_more(stream, TOO_SMALL)
        return self._finished(stream, now)

    def abandon(self, stream: Stream) -> News:
        """Cancel a sequence; return the end with what it has. A cancelled handle can no longer be read."""
        if stream.asked.beam_width > 1:
            stream.handle.cancel()
            return nothing_more(stream)
        news = News()
        # not read_all: of a sequence that still runs it waits for the rest, which only this thread could bring
        while stream.handle.can_read():
            news.add(self._news(stream, next(iter(stream.handle.read().values()))))
        stream.handle.cancel()
        news.ended = True
        return self._complete(stream, news)

    def _running(self, stream: Stream, now: int) -> News | None:
        stamps, asked = stream.stamps, stream.asked
        if asked.beam_width > 1:
            return None
        if not asked.streaming and not asked.stop_words and not stream.draft.per_iteration:
            if not stamps.first_token and stream.handle.can_read():
                stamps.first_token = now
            return None
        return self._take(stream, now)

    def _take(self, stream: Stream, now: int) -> News | None:
        """Read the new tokens of a single sequence and look for stop words in them."""
        handle, stamps = stream.handle, stream.stamps
        if not handle.can_read():
            return None
        output = next(iter(handle.read().values()))
        stamps.first_token = stamps.first_token or now
        stamps.last_token = now
        news = self._news(stream, output)
        if self._cut_at_stop_word(stream, news):
            handle.stop()
            news.ended = True
        if news.ended or stream.pieces:
            return self._complete(stream, news)
        return None

    def _finished(self, stream: Stream, now: int) -> News:
        stamps = stream.stamps
        stamps.first_token, stamps.last_token = stamps.first_token or now, now
        if stream.asked.beam_width > 1:
            return _best_beams(stream)
        outputs = stream.handle.read_all()
        news = self._news(stream, outputs[0]) if outputs else News()
        self._cut_at_stop_word(stream, news)
        news.ended = True
        return self._complete(stream, news)

    def _cut_at_stop_word(self, stream: Stream, news: News) -> bool:
        """Whether a stop word ends within the news; with a draft model, more tokens may have come after it."""
        end = stream.stop_word_end(len(news.rows[0]))
        if end is None:
            return False
        too_many = len(stream.tokens) - end
        if too_many:
            del stream.tokens[-too_many:], news.rows[0][-too_many:]
            if stream.asked.log_probs:
                stream.cum -= sum(news.log_probs[0][-too_many:])
                del stream.log_probs[-too_many:], news.log_probs[0][-too_many:]
                news.cum = [stream.cum]
        return True

    def _news(self, stream: Stream, output: Any) -> News:
        tokens = list(output.generated_ids)
        stream.draft.iteration(len(tokens), stream.asked.max_tokens)
        if output.finish_reason == _STOP and tokens and tokens[-1] == stream.asked.end_id:
            tokens.pop()
        news = News([tokens])
        if stream.asked.log_probs:
            news.log_probs = [list(output.generated_log_probs)[: len(tokens)]]
            stream.log_probs += news.log_probs[0]
            stream.cum += sum(news.log_probs[0])
            news.cum = [stream.cum]
        stream.tokens += tokens
        return news

    def _complete(self, stream: Stream, news: News) -> News:
        """Give a request that is not streamed all its tokens at once."""
        if not stream.pieces:
            news.rows, news.log_probs = [stream.tokens], [stream.log_probs]
        return news


def _best_beams(stream: Stream) -> News:
    """Rank the beams by their score."""
    asked = stream.asked
    outputs = sorted(stream.handle.read_all(), key=lambda output: output.score, reverse=True)
    news = News([], [], ended=True)
    for output in outputs[: asked.num_return_sequences or asked.beam_width]:
        tokens = list(output.generated_ids)
        if tokens and tokens[-1] == asked.end_id:
            tokens.pop()
        news.rows.append(tokens)
        news.log_probs.append(list(output.generated_log_probs)[: len(tokens)])
        news.cum.append(sum(news.log_probs[-1]))
    stream.tokens = news.rows[0]
    return news
