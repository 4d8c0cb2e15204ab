"""Sends answers: at once, or when the engine leaves time for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.sequences import News, Piece, Stream

log = logging.getLogger(__name__)


class Outbox:
    """Sends news, at once or when the budget allows.

    The engine's step holds Python's interpreter lock (openvino_genai 2026.4), so a thread of its own could send only
    in the gaps between steps; the engine's thread sends in these gaps itself. First and last pieces always go at once.
    Others share a budget, a part of the time the steps take. On any model whose step takes much longer than its
    responses (about 50 microseconds each) that is a response for every token; when a step is that short, the tokens of
    a sequence that gather meanwhile travel together, the sequence that has waited longest first.
    """

    SHARE = 0.12
    """Seconds of sending per second of engine."""
    FEW = 4
    """With so few sequences every token travels alone if sending takes no longer than the engine."""

    def __init__(self, characters: PartialCharacters, after: Callable[[Stream], None]) -> None:
        """Start empty.

        Args:
            characters: which tokens to hold back.
            after: called with every stream whose last piece was sent.
        """
        self._characters, self._after = characters, after
        self._waiting: dict[Stream, News] = {}
        self._budget = 0.0
        self._closing_replies = threading.Lock()

    def put(self, stream: Stream, news: News, *, urgent: bool) -> None:
        """Take what happened to a sequence; for the engine's thread only.

        Args:
            stream: the sequence.
            news: taken over, not copied.
            urgent: send it now.
        """
        before = self._waiting.get(stream)
        if before is not None:
            before.add(news)
            news = before
        if urgent:
            self._waiting.pop(stream, None)
            self.send(stream, news)
        elif before is None:
            self._waiting[stream] = news

    def spend(self, step_seconds: float, running: int) -> None:
        """Send what the budget allows after a step of some sequences; for the engine's thread only."""
        if not self._waiting:
            return
        share = 1.0 if running <= self.FEW else self.SHARE
        self._budget = min(self._budget + step_seconds * share, 2 * step_seconds)
        started = time.perf_counter()
        while self._waiting and time.perf_counter() - started < self._budget:
            stream = next(iter(self._waiting))
            self.send(stream, self._waiting.pop(stream))
        self._budget -= time.perf_counter() - started

    def send(self, stream: Stream, news: News) -> None:
        """Send now, from any thread."""
        try:
            self._deliver(stream, news)
        except Exception:  # a client's channel may break at any time; the others must go on
            log.exception("a response could not be sent")
            stream.cancelled = True
        if news.ended:
            self._after(stream)

    def _deliver(self, stream: Stream, news: News) -> None:
        reply = stream.reply
        if reply.closed:
            return
        if news.error:
            reply.fail(news.error, unavailable=news.unavailable)
            return
        if stream.held is not None:
            stream.held.add(news)
            news, stream.held = stream.held, None
        if stream.pieces and not news.ended and not self._cut(stream, news):
            return
        if news.ended:
            with self._closing_replies:
                reply.open -= 1
                reply.closed = reply.open == 0
        reply.channel.send(_piece(stream, news, last=reply.closed))

    def _cut(self, stream: Stream, news: News) -> bool:
        """Keep back tokens that end inside a character; return whether anything is left to send."""
        tokens = news.rows[0]
        whole = self._characters.whole(tokens)
        if whole == len(tokens):
            return bool(tokens)
        held = News([tokens[whole:]], [news.log_probs[0][whole:]], news.cum, news.logits[whole:])
        if whole == 0:
            held.context_logits = news.context_logits
        news.rows, news.log_probs, news.logits = [tokens[:whole]], [news.log_probs[0][:whole]], news.logits[:whole]
        if news.log_probs[0]:
            news.cum = [news.cum[0] - sum(held.log_probs[0])]
        stream.held = held
        return whole > 0


def _piece(stream: Stream, news: News, *, last: bool) -> Piece:
    asked = stream.asked
    rows = news.rows
    if not asked.streaming and not asked.exclude_input:
        prompt = asked.prompt.tolist()
        rows = [prompt + row for row in rows]
    piece = Piece(stream, rows, last=last)
    if asked.log_probs:
        piece.log_probs, piece.cum_log_probs = news.log_probs, news.cum or [0.0] * len(rows)
    piece.context_logits = news.context_logits
    if asked.generation_logits and news.logits:
        piece.generation_logits = np.stack(news.logits)[None]
    return piece
