"""Limits of an engine: those that are given, and those that were chosen for the load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD, BuildSettings
from pipelines.predict.performance.memory import EngineSizes
from pipelines.settings.root import Settings

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Values tried for max_batch_size, up to trtllm-build's default."""
LEAST_TOKENS = 4096
"""Least max_num_tokens and max_seq_len: the few-shot prompts of an evaluation must fit, whatever the load is."""
STEP = 1024
"""Limits in tokens are multiples of this, so that similar loads share an engine."""


@dataclass(frozen=True, slots=True)
class WantedLimits:
    """Limits as the user gives them, None for those to choose, and what else restricts them.

    Attributes:
        max_batch_size: requests scheduled together.
        max_num_tokens: tokens of one iteration.
        max_seq_len: prompt and output of one request.
        max_input_len: prompt of one request.
        chunked: whether prompts longer than max_num_tokens are split.
        tokens_per_step: tokens of a decoding request in one iteration: 1, and the draft tokens that are checked.
    """

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_input_len: int | None = None
    chunked: bool = False
    tokens_per_step: int = 1

    @classmethod
    def of(cls, build: BuildSettings, *, chunked: bool) -> WantedLimits:
        """Read what the settings give."""
        given = {name: getattr(build, name) if build.given(name) else None for name in LIMITS_FOR_LOAD}
        return cls(**given, chunked=chunked, tokens_per_step=build.max_beam_width * (1 + build.max_draft_len))

    @property
    def all_given(self) -> bool:
        """Whether nothing is left to choose."""
        return None not in (self.max_batch_size, self.max_num_tokens, self.max_seq_len, self.max_input_len)


NOTHING_GIVEN = WantedLimits()


@dataclass(frozen=True, slots=True)
class ChosenLimits:
    """Limits of an engine, given or chosen.

    Attributes:
        max_batch_size: requests scheduled together.
        max_num_tokens: tokens of one iteration.
        max_seq_len: prompt and output of one request.
        max_input_len: prompt of one request.
        reasons: by name, of each that was chosen and is not simply the default.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_input_len: int
    reasons: dict[str, str]

    def sizes(self, sizes: EngineSizes) -> EngineSizes:
        """Return the sizes with these limits."""
        return replace(
            sizes,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
        )

    def text(self) -> str:
        """Name all limits and how each came about: "max_batch_size 2,048 (given), max_num_tokens 4,096 (chosen)"."""
        return ", ".join(
            f"{name} {getattr(self, name):,} ({'chosen' if name in self.reasons else 'given'})"
            for name in ("max_batch_size", "max_num_tokens", "max_seq_len")
        )

    def lines(self) -> tuple[str, ...]:
        """Describe the chosen limits: "max_batch_size 256: reaches ..."."""
        return tuple(f"{name} {getattr(self, name):,}: {why}" for name, why in self.reasons.items())


def stepped(tokens: int) -> int:
    """Round up to a multiple of STEP."""
    return -(-tokens // STEP) * STEP


def with_limits(settings: Settings, limits: ChosenLimits | None) -> Settings:
    """Return the settings with the limits that were chosen."""
    if limits is None:
        return settings
    values = {name: getattr(limits, name) for name in LIMITS_FOR_LOAD}
    return settings.model_copy(update={"build": settings.build.model_copy(update=values)})
