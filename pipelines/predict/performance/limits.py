"""Limits of an engine: those that are given, and those that were chosen for the load."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.tensorrt_llm.config import LIMITS_FOR_LOAD, BuildSettings
from pipelines.loadgen.config import WorkloadSettings
from pipelines.loadgen.plan import mixed_sampler
from pipelines.loadgen.trace import read_trace
from pipelines.predict.performance.memory import EngineSizes
from pipelines.predict.performance.models import engine_of, has_attention_dp
from pipelines.settings.root import Settings


@dataclass(frozen=True, slots=True)
class LoadLengths:
    """Tokens of the requests of a load.

    Attributes:
        longest: longest input and output of one request together.
    """

    mean_isl: float
    mean_osl: float
    longest_isl: int
    longest: int

    @classmethod
    def of(cls, isl: Any, osl: Any) -> Self:
        """Summarize int64[n] input and output tokens."""
        return cls(float(isl.mean()), float(osl.mean()), int(isl.max()), int((isl + osl).max()))

    @property
    def mean(self) -> int:
        """Mean input and output of a request together, rounded."""
        return round(self.mean_isl + self.mean_osl)


def known_lengths(settings: Settings) -> LoadLengths | None:
    """Summarize the requests of the workload: as stated, and as drawn where only the distribution is stated.

    Returns:
        None for a trace of prompts, which only the tokenizer can count, and for a file that cannot be read, which the
        load generator or the simulator reports.
    """
    try:
        workload, drawn = settings.workload, settings.sizing.requests
        if workload.trace is not None and len(read_trace(workload).osl) > drawn:
            return LoadLengths.of(*traced_lengths(workload))
        return _stated(workload) or LoadLengths.of(*drawn_lengths(workload, drawn))
    except UserError:
        return None


def _stated(workload: WorkloadSettings) -> LoadLengths | None:
    """Compute the means and bounds of a workload whose settings state them; the k-th turn repeats those before it."""
    if workload.trace is not None:
        return None
    turns, parts = workload.turns, []
    for part in workload.parts:
        isl, osl = part.isl, part.osl
        if isl.expected is None or osl.expected is None or isl.longest is None or osl.longest is None:
            return None
        prompt = turns * isl.longest + (turns - 1) * osl.longest
        mean_isl = (turns + 1) / 2 * isl.expected + (turns - 1) / 2 * osl.expected
        parts.append((part.share * mean_isl, part.share * osl.expected, prompt, prompt + osl.longest))
    mean_isls, mean_osls, prompts, sequences = zip(*parts, strict=True)
    return LoadLengths(sum(mean_isls), sum(mean_osls), max(prompts), max(sequences))


def drawn_lengths(workload: WorkloadSettings, count: int) -> tuple[Any, Any]:
    """Return int64[n] input and output tokens, drawn as the load generator draws them, or read from a trace.

    In a conversation each turn carries all earlier ones, so turn k has k prompts and k - 1 answers as its input.

    Raises:
        UserError: a file cannot be read, or a trace has prompts instead of lengths.
    """
    import numpy as np  # a plan without a GPU needs none

    if workload.trace is None:
        return sampled_lengths(workload, count, Random(workload.seed))
    isl, osl = traced_lengths(workload)
    if len(isl) <= count:
        return np.resize(isl, count), np.resize(osl, count)
    # of more requests, the middle one of each of so many equal parts by length, in an order of its own
    places = np.argsort(isl + osl, kind="stable")[((np.arange(count) + 0.5) * len(isl) / count).astype(int)]
    places = np.random.default_rng(workload.seed).permutation(places)
    return isl[places], osl[places]


def traced_lengths(workload: WorkloadSettings) -> tuple[Any, Any]:
    """Return int64[n] input and output tokens of all requests of a trace.

    Raises:
        UserError: it cannot be read, or has prompts instead of lengths.
    """
    import numpy as np

    trace = read_trace(workload)
    if trace.prompts:
        raise UserError(
            f"workload.trace={workload.trace} has prompts, whose tokens only the model's tokenizer can count.",
            todo="Give their lengths instead, in a column isl.",
        )
    return np.array(trace.isl, dtype=np.int64), np.array(trace.osl, dtype=np.int64)


def sampled_lengths(workload: WorkloadSettings, count: int, random: Random, users: int = 1) -> tuple[Any, Any]:
    """Return int64[n] input and output tokens of users who send at the same time, each one turn after the other."""
    import numpy as np

    draw = mixed_sampler(workload, random)
    rows: list[tuple[int, int]] = []
    while len(rows) < count:
        held = [0] * max(users, 1)
        pairs = [draw() for _ in held]
        for _ in range(workload.turns):
            for user, (before, (prompt, answer)) in enumerate(zip(held, pairs, strict=True)):
                isl, osl = before + prompt(), answer()
                rows.append((isl, osl))
                held[user] = isl + osl
    isl_, osl_ = zip(*rows[:count], strict=True)
    return np.array(isl_, dtype=np.int64), np.array(osl_, dtype=np.int64)


# Convert settings to the terms of the memory model.


def engine_sizes(settings: Settings, shape: ModelShape) -> EngineSizes:
    """Return the sizes that determine an engine's memory, from the settings."""
    build, triton, engine = settings.build, settings.triton, engine_of(settings, shape)
    return EngineSizes(
        shape=shape,
        qformat=settings.quant.qformat,
        kv_format=settings.kv_cache.dtype,
        group_size=settings.quant.group_size,
        mean_bits=settings.quant.mean_bits,
        tp_size=build.tp_size,
        pp_size=build.pp_size,
        max_batch_size=build.max_batch_size,
        max_beam_width=build.max_beam_width,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len or shape.max_position_embeddings,
        tokens_per_block=build.tokens_per_block,
        user_buffers=build.user_buffer == "enable",
        gather_context_logits=build["gather_context_logits"] or build["gather_all_token_logits"],
        gpu_weights_percent=triton.gpu_weights_percent if build.weight_streaming else 1.0,
        kv_fraction=triton.kv_cache_free_gpu_mem_fraction,
        max_kv_tokens=triton.max_tokens_in_paged_kv_cache,
        attention_dp=has_attention_dp(settings, shape),
        # the PyTorch backend's KV cache keeps all tokens unless it is told a window
        # (`max_attention_window_vec` in tensorrt_llm/_torch/pyexecutor/resource_manager.py)
        windows=tuple(triton.max_attention_window_size or (shape.windows if engine.writes_engine else ())),
    )


def request_tokens(settings: Settings) -> int | None:
    """Return the mean prompt + output of the workload's requests in tokens; None where a file does not tell it."""
    lengths = known_lengths(settings)
    return None if lengths is None else lengths.mean


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
    def of(cls, build: BuildSettings, *, chunked: bool) -> Self:
        """Read the limits in the settings."""
        limits = {name: getattr(build, name) if build.given(name) else None for name in LIMITS_FOR_LOAD}
        return cls(**limits, chunked=chunked, tokens_per_step=build.max_beam_width * (1 + build.max_draft_len))

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
            sizes, max_batch_size=self.max_batch_size, max_num_tokens=self.max_num_tokens, max_seq_len=self.max_seq_len
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
