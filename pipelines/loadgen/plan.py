"""Draw each level's requests before it starts: prompts, lengths and due times. Same settings, same load."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise, takewhile
from pathlib import Path
from random import Random

from pipelines.domain.benchmark import load_text
from pipelines.domain.errors import UserError
from pipelines.domain.summary import SECOND
from pipelines.domain.units import show_bytes
from pipelines.host.files import small_text
from pipelines.loadgen.config import DEFAULT_CONCURRENCY, OPEN_RATE, BenchmarkSettings, LengthSettings, WorkloadSettings
from pipelines.loadgen.prompts import PromptMaker
from pipelines.loadgen.trace import read_trace

# Draw the lengths of prompts and outputs for each request.


def sampler(length: LengthSettings, rng: Random, *, key: str) -> Callable[[], int]:
    """Return a function that draws one length, in tokens, at least 1.

    Args:
        length: the distribution.
        rng: random number generator; the same seed gives the same lengths.
        key: its name in the configuration, for messages, e.g. "workload.isl".

    Raises:
        UserError: the file of an empirical distribution cannot be read.
    """
    low, high = length.min or 1, length.max or math.inf
    draw = _family(length, rng, key)
    return lambda: int(min(max(round(draw()), low), high))


LengthPair = tuple[Callable[[], int], Callable[[], int]]
"""Draw an input length, and an output length."""


def mixed_sampler(workload: WorkloadSettings, rng: Random) -> Callable[[], LengthPair]:
    """Return a function that draws, for one conversation, of which part of the mix it is.

    Raises:
        UserError: the file of an empirical distribution cannot be read.
    """
    pairs = []
    for number, part in enumerate(workload.parts):
        key = f"workload.mix.{number - 1}" if number else "workload"
        pairs.append((sampler(part.isl, rng, key=f"{key}.isl"), sampler(part.osl, rng, key=f"{key}.osl")))
    if not workload.mix:
        return lambda: pairs[0]
    shares = [part.share for part in workload.parts]
    return lambda: rng.choices(pairs, shares)[0]


def _family(length: LengthSettings, rng: Random, key: str) -> Callable[[], float]:
    mean, stdev = length.mean or 0.0, length.stdev or 0.0
    if length.distribution == "fixed":
        return lambda: mean
    if length.distribution == "normal":
        return lambda: rng.gauss(mean, stdev)
    if length.distribution == "lognormal":
        # For the tokens themselves: mean = exp(mu + sigma^2/2), (stdev/mean)^2 = exp(sigma^2) - 1.
        variance = math.log1p((stdev / mean) ** 2)
        return lambda: rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    if length.distribution == "uniform":
        low, high = length.min or 1, length.max or 1
        return lambda: rng.randint(low, high)
    values = length.values if length.values is not None else _read(length.file, key)
    return lambda: rng.choice(values)


def _read(path: Path | None, key: str) -> tuple[int, ...]:
    """Read one positive integer per line; empty lines are skipped."""
    assert path is not None  # checked by the settings
    try:
        lines = small_text(path).splitlines()
    except (OSError, UserError, UnicodeDecodeError) as error:
        reason = f"{error.strerror}." if isinstance(error, OSError) else str(error)
        raise UserError(f"{key}.file={path} cannot be read: {reason}") from None
    values = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not (text.isdecimal() and int(text) > 0):
            raise UserError(
                f"{key}.file={path}, line {number}: '{text[:40]}' is not a positive number.",
                allowed="One positive number per line.",
            )
        values += [int(text)] if text else []
    if not values:
        raise UserError(f"{key}.file={path} holds no numbers.", allowed="One positive number per line.")
    return tuple(values)


# Arrival processes: when requests of an open loop are due, in ns from the start of the level.


def offsets(arrival: str, rate: float, cv: float, rng: Random) -> Iterator[int]:
    """Yield due times forever, ascending, the first after one gap.

    Args:
        arrival: "constant", "poisson" or "gamma".
        rate: requests per second.
        cv: gamma: coefficient of variation of the gaps (shape 1/cv^2, mean 1/rate).
        rng: random number generator.
    """
    count, now = 0, 0.0
    while True:
        count += 1
        if arrival == "constant":
            now = count / rate  # no running sum, so that rounding errors do not accumulate
        elif arrival == "poisson":
            now += rng.expovariate(rate)
        else:
            now += rng.gammavariate(1 / cv**2, cv**2 / rate)
        yield round(now * SECOND)


WARMUP_USERS = 4
"""Users of the closed loop that warms up for a burst, a trace or a whole open loop."""
OPEN_CONVERSATIONS = 16
"""Conversations that an open loop continues in turn."""
_POOL_TOKENS = 4_000_000
_POOL_LEAST = 64
_POOL_BYTES, _MOST_BYTES = 2**27, 2**31
"""Of pictures: those of a closed loop, which go on with new ones, and of all other loads."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        text: the prompt; of a conversation by chat, its last message.
        isl: its input tokens by the tokenizer.
        shared: words at the beginning that are common to all prompts.
        history: earlier messages of user and assistant in turn.
        images: seeds of the pictures of the first message.
        image_side: of each, pixels.
        then: later turns of its session in a trace, each with the ns from the end of the answer before.
    """

    text: str
    isl: int
    osl: int
    shared: int = 0
    history: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    image_side: int = 0
    then: "tuple[tuple[int, PlannedRequest], ...]" = ()

    def renewed(self, words: Mapping[str, int], times: int) -> "PlannedRequest":
        """Return the same request with other pictures or another word behind the common prefix, new to a KV cache.

        Args:
            words: words of one token each, without the space before them, and their places.
            times: how often the request was sent already.
        """
        if self.images:
            return replace(self, images=tuple(seed + times for seed in self.images))
        first, *rest = *self.history, self.text
        pieces = first.split(" ")
        place = max(self.shared, 1) + (not pieces[0])  # the very first word is of another kind than the others
        if place >= len(pieces) or pieces[place] not in words:
            return self
        names = list(words)
        pieces[place] = names[(words[pieces[place]] + times) % len(names)]
        *history, text = " ".join(pieces), *rest
        return replace(self, text=text, history=tuple(history))


Conversation = list[PlannedRequest]


@dataclass(frozen=True, slots=True)
class PlannedLevel:
    """One level before prompts are drawn."""

    number: int
    arrival: str
    concurrency: int | None
    request_rate: float | None

    @property
    def title(self) -> str:
        """See `load_text`."""
        return load_text(self.arrival, self.concurrency, self.request_rate)


def loads(workload: WorkloadSettings, settings: BenchmarkSettings) -> list[PlannedLevel]:
    """List the levels in the order they are measured."""
    arrival = workload.arrival
    if arrival == "closed":
        levels = settings.concurrency or DEFAULT_CONCURRENCY
        return [PlannedLevel(number, arrival, users, None) for number, users in enumerate(levels, 1)]
    if arrival in OPEN_RATE:
        return [PlannedLevel(number, arrival, None, rate) for number, rate in enumerate(settings.request_rate or (), 1)]
    return [PlannedLevel(1, arrival, None, None)]


def is_whole(workload: WorkloadSettings, settings: BenchmarkSettings) -> bool:
    """Return whether the window spans the whole run, as it must for bursts and traces, which have no steady state."""
    return settings.window == "whole" or workload.arrival in ("burst", "trace")


class LevelPlan:
    """The requests of one level."""

    def __init__(
        self,
        load: PlannedLevel,
        workload: WorkloadSettings,
        settings: BenchmarkSettings,
        maker: PromptMaker,
        salt: int = 0,
        nonce: str = "",
    ) -> None:
        """Prepare to draw.

        Args:
            load: the level.
            workload: lengths, prompts, arrival.
            settings: length of the window, number of requests.
            maker: makes the prompts.
            salt: another number gives other requests; the warm-up uses its own.
            nonce: of this measurement, so that no prompt is one of an earlier; lengths and times do not depend on it.
        """
        self.load, self._workload, self._settings, self._maker = load, workload, settings, maker
        self._rng = Random(f"{workload.seed}/{load.number}/{salt}")
        self._words = Random(f"{nonce}/{workload.seed}/{load.number}/{salt}")

    def pool(self, count: int | None = None) -> list[Conversation]:
        """Make conversations for a closed loop; users take one after another and start over when all are used.

        Args:
            count: requests needed; None if not known beforehand.
        """
        rng, turns, side = self._rng, self._workload.turns, self._workload.image_side
        picture_bytes = self._workload.images * 3 * side**2
        draw = mixed_sampler(self._workload, rng)
        chosen = [draw()]
        first = [(self._room(chosen[0][0]()), chosen[0][1]())]
        if count is None:
            tokens = first[0][0] * turns * (turns + 1) // 2
            most = min(self._workload.prompts // turns, _POOL_TOKENS // tokens, _POOL_BYTES // (picture_bytes or 1))
            count = turns * max(most, _POOL_LEAST)
        if count * picture_bytes > _MOST_BYTES:
            raise UserError(
                f"{count:,} requests with workload.images={self._workload.images} have pictures of"
                f" {show_bytes(count * picture_bytes)}; at most {show_bytes(_MOST_BYTES)} are kept ready to be sent.",
                todo="Lower workload.image_side, the rate or the duration.",
            )
        for _ in range(-(-count // turns) - 1):
            chosen.append(pair := draw())
            first.append((self._room(pair[0]()), pair[1]()))
        share = self._workload.shared_prefix_share
        texts = self._maker.make([tokens for tokens, _ in first], self._words, prefix_share=share)
        conversations = [
            [PlannedRequest(text, *sizes, shared=round(share * sizes[0]), images=self._images(), image_side=side)]
            for text, sizes in zip(texts, first, strict=True)
        ]
        for conversation, pair in zip(conversations, chosen, strict=True):
            self._go_on(conversation, *pair)
        return conversations

    def schedule(self) -> list[tuple[int, PlannedRequest]]:
        """Make the due times (ns from the start of the level) and requests of an open loop, a burst or a trace."""
        if self.load.arrival == "trace":
            return self._trace()
        times = self._times()
        pool = self.pool(len(times))
        return list(zip(times, _interleaved(pool), strict=False))

    def window_ns(self, times: list[int]) -> tuple[int, int]:
        """Return the steady window of an open loop: [end of warm-up, end of the last gap)."""
        begin, end, seconds = self._begin(), times[-1] + 1, self._seconds()
        most = self._settings.num_requests
        if seconds is not None and (most is None or sum(at >= begin for at in times) < most):
            end = max(end, begin + round(seconds * SECOND))  # the number of requests did not end the level
        return begin, end

    def _times(self) -> list[int]:
        if self.load.arrival == "burst":
            return [0] * (self._settings.num_requests or 0)
        stream = offsets(self.load.arrival, self.load.request_rate or 1.0, self._workload.cv, self._rng)
        begin = self._begin()
        before, due = [], next(stream)
        while due < begin:
            before.append(due)
            due = next(stream)
        least = min(self._settings.min_requests, self._settings.num_requests or self._settings.min_requests)
        first = [due, *islice(stream, least - 1)]
        end = begin + round((self._seconds() or 1e9) * SECOND)
        more = takewhile(lambda at: at < end, stream) if first[-1] < end else iter(())
        missing = None if self._settings.num_requests is None else self._settings.num_requests - len(first)
        return before + first + list(islice(more, missing))

    def _begin(self) -> int:
        return 0 if self._settings.window == "whole" else round(self._settings.warmup_s * SECOND)

    def _seconds(self) -> float | None:
        return self._settings.seconds(self.load.request_rate or 0.0)

    def _go_on(self, conversation: Conversation, isl: Callable[[], int], osl: Callable[[], int]) -> None:
        """Add the later turns: everything before, a synthetic answer of the requested length, and new words."""
        for _ in range(self._workload.turns - 1):
            last, new = conversation[-1], isl()
            tokens, history = last.isl + last.osl + new, last.history
            if (wrapping := self._maker.turn_tokens) is None:
                text = self._maker.extend(last.text, tokens, self._words)
            else:
                lengths = [last.osl, max(new - wrapping, 1)]
                answer, text = self._maker.make([each + self._maker.overhead for each in lengths], self._words)
                tokens, history = last.isl + sum(lengths) + wrapping, (*history, last.text, answer)
            turn = PlannedRequest(text, tokens, osl(), last.shared, history, last.images, last.image_side)
            conversation.append(turn)

    def _images(self) -> tuple[int, ...]:
        return tuple(self._words.getrandbits(63) for _ in range(self._workload.images))

    def _room(self, tokens: int) -> int:
        """Raise a drawn length that leaves no room for a word to the shortest that does; a fixed one is refused."""
        fixed = self._workload.isl.distribution == "fixed" and not self._workload.mix
        return tokens if fixed else max(tokens, self._maker.overhead + 1)

    def _trace(self) -> list[tuple[int, PlannedRequest]]:
        trace, most = read_trace(self._workload), self._settings.num_requests
        lengths = [self._room(isl) for isl in trace.isl[:most] if isl]
        made = iter(self._maker.make(lengths, self._words, prefix_share=self._workload.shared_prefix_share))
        texts = (trace.prompts[place] if place in trace.prompts else next(made) for place in range(len(trace.osl)))
        rows = zip(trace.offset_ns[:most], trace.osl[:most], texts, strict=False)
        items = [(due, PlannedRequest(text, self._maker.count(text), osl)) for due, osl, text in rows]
        firsts = [place for place in range(len(items)) if place not in trace.waiting]
        turns = (tuple(items[here + 1 : end]) for here, end in pairwise([*firsts, len(items)]))
        return [(items[here][0], replace(items[here][1], then=then)) for here, then in zip(firsts, turns, strict=True)]


def _interleaved(pool: list[Conversation]) -> Iterator[PlannedRequest]:
    """Interleave the turns of several conversations, keeping the order within each."""
    for start in range(0, len(pool), OPEN_CONVERSATIONS):
        group = pool[start : start + OPEN_CONVERSATIONS]
        for turn in range(len(group[0])):
            yield from (conversation[turn] for conversation in group)
