"""Run the CPU engine's scheduler without a server and record tokens and the times at which they came out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.scheduler import Scheduler
from pipelines.engines.openvino.sequences import DraftUse, KvUse, PromptScores, ResponsePart, Stamps
from pipelines.engines.openvino.serving_options import ServingOptions


@dataclass
class Channel:
    """The response to one request.

    Attributes:
        tokens: all tokens.
        log_probs: their log probabilities, if requested.
        prompt: log probabilities of the prompt, if requested.
        moments: when each part arrived, in seconds of `time.perf_counter`.
        error: the error, or empty.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    prompt: PromptScores | None = None
    moments: list[float] = field(default_factory=list)
    error: str = ""
    stamps: Stamps = field(default_factory=Stamps)
    kv: KvUse = field(default_factory=KvUse)
    draft: DraftUse = field(default_factory=DraftUse)
    ended: threading.Event = field(default_factory=threading.Event)
    waits: bool = False

    def send(self, part: ResponsePart) -> None:
        """Receive a part of the answer."""
        self.moments.append(time.perf_counter())
        self.tokens += part.rows[0]
        if part.log_probs:  # of a stream all so far, otherwise there is one part
            self.log_probs = part.log_probs[0]
        self.prompt = part.prompt or self.prompt
        self.stamps, self.kv, self.draft = part.sequence.stamps, part.sequence.kv, part.sequence.draft
        if part.last:
            self.ended.set()

    def fail(self, message: str, *, unavailable: bool) -> None:
        """Receive an error."""
        self.error = message
        self.ended.set()

    def is_cancelled(self) -> bool:
        """Return whether the client is gone, which never happens here."""
        return False

    @property
    def ttft(self) -> float:
        """Return the seconds from the request to its first token."""
        return (self.stamps.first_token - self.stamps.arrival) / 1e9

    def wait(self) -> Channel:
        """Wait for the end of the answer."""
        assert self.ended.wait(60)
        assert not self.error, self.error
        return self


def asked(prompt: Sequence[int], tokens: int, **values: Any) -> GenerationRequest:
    """Make a streaming request."""
    return GenerationRequest(
        np.array(prompt, dtype=np.int64), tokens, **{"streaming": True, "exclude_input": True, **values}
    )


@contextmanager
def scheduler(engine: Path, adapters: Mapping[int, LoraAdapter] | None = None, **options: Any) -> Iterator[Scheduler]:
    """Run an engine, by default in float32 on one thread."""
    chosen = OpenVinoOptions(**{"inference_precision": "f32", "num_threads": 1, **options})
    running = Scheduler(
        EngineFolder.load(engine), ServingOptions(engine, engine=chosen), PartialCharacters.none(), adapters
    )
    try:
        yield running
    finally:
        running.close()


def answers(running: Scheduler, requests: Sequence[GenerationRequest]) -> list[Channel]:
    """Send all requests at once and wait for all answers."""
    channels = [Channel() for _ in requests]
    for request, channel in zip(requests, channels, strict=True):
        running.submit([request], channel)
    return [channel.wait() for channel in channels]
