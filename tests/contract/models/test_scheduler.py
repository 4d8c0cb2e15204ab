"""The scheduler without a server: an engine that fails, and a scheduler that is closed, leave nobody waiting."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino_genai")

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.scheduler import Scheduler
from pipelines.engines.openvino.sequences import ResponsePart
from pipelines.engines.openvino.serving_options import ServingOptions


class Channel:
    """Remembers tokens and the end."""

    waits = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""
        self.cancelled = False
        self.ended = threading.Event()

    def send(self, part: ResponsePart) -> None:
        self.tokens += part.rows[0]
        if part.last:
            self.ended.set()

    def fail(self, message: str, *, unavailable: bool) -> None:
        self.error = message
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled


def asked(tokens: int = 900, **values: Any) -> GenerationRequest:
    return GenerationRequest(np.array([2, 388, 774]), tokens, streaming=True, exclude_input=True, **values)


@pytest.fixture
def failed() -> threading.Event:
    """Set when the scheduler reports that its engine has failed."""
    return threading.Event()


@pytest.fixture
def scheduler(engine: Path, failed: threading.Event) -> Iterator[Scheduler]:
    options = ServingOptions(engine, cancellation_check_period_ms=10)
    made = Scheduler(EngineFolder.load(engine), options, PartialCharacters.none(), failed=failed.set)
    yield made
    made.close()


class BrokenPipeline:
    """Stands for an engine whose next step fails."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def step(self) -> None:
        raise RuntimeError("out of memory")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_failed_engine_reaches_every_client(
    scheduler: Scheduler, failed: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running, waiting and new requests all hear why, and then the process that holds it."""
    channels = [Channel() for _ in range(6)]
    for channel in channels:
        scheduler.submit([asked()], channel)
    pipeline = scheduler._pipelines.of(asked())
    monkeypatch.setattr(pipeline, "_pipeline", BrokenPipeline(pipeline._pipeline))
    assert all(channel.ended.wait(60) for channel in channels)
    assert all("out of memory" in channel.error for channel in channels)
    assert failed.wait(60)
    with pytest.raises(UserError, match="out of memory"):
        scheduler.submit([asked()], Channel())


def test_closing_tells_every_client(engine: Path) -> None:
    made = Scheduler(EngineFolder.load(engine), ServingOptions(engine), PartialCharacters.none())
    channels = [Channel() for _ in range(6)]
    for channel in channels:
        made.submit([asked()], channel)
    made.close()
    assert all(channel.ended.is_set() for channel in channels)
    assert {channel.error for channel in channels} == {"The engine is stopping; no new requests are accepted."}


def test_a_request_that_no_empty_queue_could_take_is_not_told_to_wait(engine: Path) -> None:
    """Four slots and two places: six answers fit, seven never will."""
    made = Scheduler(EngineFolder.load(engine), ServingOptions(engine, max_queue_size=2), PartialCharacters.none())
    with pytest.raises(UserError, match="asks for 7 answers; this engine runs up to 4 at a time and lets 2 wait"):
        made.submit([asked(2)] * 7, Channel())
    made.submit([asked(2)] * 6, Channel())
    with pytest.raises(UserError, match="Exceeds maximum queue size"):
        made.submit([asked(2)] * 6, Channel())
    made.close()


def test_a_vanished_client_frees_its_slot_for_one_that_waits(scheduler: Scheduler) -> None:
    """Four slots are taken; the fifth request starts when one of their clients is gone."""
    running = [Channel() for _ in range(4)]
    for channel in running:
        scheduler.submit([asked(1000)], channel)
    waiting = Channel()
    scheduler.submit([asked(2)], waiting)
    running[0].cancelled = True
    assert waiting.ended.wait(60)
    assert len(waiting.tokens) == 2
    assert running[0].ended.wait(60)
    assert len(running[0].tokens) < 1000


def test_a_vanished_client_that_wanted_the_whole_answer_frees_its_slot(scheduler: Scheduler) -> None:
    """Tokens that nobody has read yet are left over when it goes."""
    gone, other = Channel(), Channel()
    scheduler.submit([replace(asked(1000), streaming=False)], gone)
    scheduler.submit([asked(200)], other)
    while len(other.tokens) < 50:
        assert not other.ended.wait(0.01)
    gone.cancelled = True
    assert gone.ended.wait(60)
    assert 0 < len(gone.tokens) < 1000
    assert other.ended.wait(60)
    assert len(other.tokens) == 200


@pytest.mark.parametrize(("slots", "values"), [(4, {}), (8, {"top_log_probs": 1})], ids=["batch", "logits loop"])
def test_a_late_or_vanished_request_leaves_the_queue_behind_one_that_waits(
    scheduler: Scheduler, slots: int, values: dict[str, int]
) -> None:
    for _ in range(slots):
        scheduler.submit([asked(1000, **values)], Channel())
    ahead, late, gone = Channel(), Channel(), Channel()
    scheduler.submit([asked(2, **values)], ahead)
    scheduler.submit([asked(2, **values)], late, timeout_us=1)
    scheduler.submit([asked(2, **values)], gone)
    gone.cancelled = True
    assert late.ended.wait(60)
    assert gone.ended.wait(60)
    assert "timeout" in late.error
    assert not ahead.tokens


def test_the_logits_loop_does_not_hold_up_the_others(scheduler: Scheduler) -> None:
    """Requests with a bias run beside the batch and choose the same tokens when the bias changes nothing."""
    bias = np.zeros(1920, dtype=np.float32)
    bias[5] = -1e3
    plain, biased = Channel(), Channel()
    scheduler.submit([asked(40, bias=bias)], biased)
    scheduler.submit([asked(40)], plain)
    assert plain.ended.wait(60)
    assert biased.ended.wait(60)
    assert plain.tokens[:8] == biased.tokens[:8]
