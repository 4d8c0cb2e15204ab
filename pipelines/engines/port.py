"""What the rest of the project knows of an engine; standard library types only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pipelines.domain.progress import Progress

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Limits an engine is built for, under their trtllm-build names.

    Attributes:
        max_batch_size: requests scheduled together.
        max_input_len: longest prompt, tokens.
        max_seq_len: longest prompt + output, tokens.
        max_num_tokens: tokens of all requests in one iteration.
        max_beam_width: beams per request.
        tokens_per_block: tokens of one paged KV block.
    """

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int = 1
    tokens_per_block: int = 32


@dataclass(frozen=True, slots=True)
class OnGpu:
    """What an engine is built for beyond its limits, where it belongs to a GPU, and where its build keeps things.

    Attributes:
        gpu: name of the GPU; kernels are tuned for it. Empty where it is not known.
        sm: its compute capability, e.g. 9.0; no other runs the engine. None where it is not known.
        timing_caches: folder of the timing caches.
        failed_logs: folder for the logs of failed builds.
    """

    gpu: str
    sm: float | None
    timing_caches: Path
    failed_logs: Path


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Greedy unless `temperature` > 0.

    Attributes:
        max_new_tokens: output tokens at most.
        stop_token_ids: generation ends after one of these (it is not returned).
        temperature: 0 is greedy.
        top_k: 0 is all.
        top_p: 1 is all.
        seed: of the sampler.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request brought: tokens after the prompt, and why it ended ("stop" or "length")."""

    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a build wants remembered in the manifest."""

    engine_bytes: int
    details: Mapping[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """An engine that is loaded and answers. Use as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def generate(self, prompts: Sequence[TokenIds], limits: SamplingParams, progress: Progress) -> list[Generation]:
        """Generate for every prompt with in-flight batching; results in the order of the prompts."""
        ...

    def loglikelihood(self, pairs: Sequence[tuple[TokenIds, TokenIds]], progress: Progress) -> list[tuple[float, bool]]:
        """Score continuations.

        Args:
            pairs: (context, continuation) token ids; both non-empty.
            progress: told one unit per pair.

        Returns:
            per pair, the summed natural-log probability of the continuation and
            whether it is what greedy decoding would have produced.
        """
        ...


class Engine(Protocol):
    """One engine flavour."""

    name: str

    def build(self, checkpoint: Path, limits: BuildLimits, out_dir: Path, progress: Progress) -> EngineFacts:
        """Build `out_dir` from a TensorRT-LLM checkpoint folder."""
        ...

    def open(self, engine_dir: Path) -> Session:
        """Load a built engine."""
        ...
