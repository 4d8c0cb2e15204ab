"""Input of the sizing calculator, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat, group_instead
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.gpus import GpuSpec
from pipelines.predict.performance.lengths import LoadLengths
from pipelines.predict.performance.performance import Setup
from pipelines.predict.performance.placement import EngineTerms, Judge, unjudged
from pipelines.predict.sizing.demand import Demand
from pipelines.predict.sizing.price import Prices

NO_PRICES = Prices()


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Question of how many GPUs a load needs within given limits.

    Attributes:
        model: dimensions of the model.
        gpu: data sheet of the GPU.
        demand: requests per second.
        isl: int64[n], input tokens, drawn.
        osl: int64[n], output tokens, drawn.
        gaps: float64[n], arrival gaps with mean 1, drawn once, so that all rates see the same sample.
        slo: latency limits; without any, only throughput counts.
        terms: properties of the engine in any format and split.
        percentile: percentage of requests that must meet each limit, e.g. 95.
        mode: "online", "sequential" or "offline".
        headroom: share of each instance's rate kept free.
        spare: additional instances.
        tp: tensor parallel sizes to try.
        pp: pipeline parallel sizes to try.
        formats: weight formats to try.
        kv_formats: KV-cache formats to try.
        kv_of: the only one to try with a weight format, for those that have one.
        sparse: whether the weights are 2:4-sparse.
        prices: prices of servers, GPUs and electricity.
        framework: framework that serves the model.
        stated: mean and longest lengths as the settings state them; None takes those of `isl` and `osl`.
        judge: rules that a plan of the configuration would have to keep.
    """

    model: ModelShape
    gpu: GpuSpec
    demand: Demand
    isl: Any
    osl: Any
    gaps: Any
    slo: Slo
    terms: EngineTerms
    percentile: float = 95.0
    mode: str = "online"
    headroom: float = 0.0
    spare: int = 0
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    formats: tuple[QFormat, ...] = (QFormat.NONE,)
    kv_formats: tuple[KvFormat, ...] = (KvFormat.AUTO,)
    kv_of: Mapping[QFormat, KvFormat] = field(default_factory=dict)
    sparse: bool = False
    prices: Prices = NO_PRICES
    framework: str = "TensorRT-LLM 1.2"
    stated: LoadLengths | None = None
    judge: Judge = unjudged

    @property
    def lengths(self) -> LoadLengths:
        """Mean and longest lengths of the requests."""
        return self.stated or LoadLengths.of(self.isl, self.osl)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return int((self.isl + self.osl).max())

    @property
    def mean_isl(self) -> float:
        """Mean input tokens."""
        return float(self.isl.mean())

    @property
    def mean_osl(self) -> float:
        """Mean output tokens."""
        return float(self.osl.mean())

    def setups(self) -> Iterator[Setup]:
        """Return every configuration to try."""
        sizes = self.terms.sizes
        for qformat in self.formats:
            kv_formats = (self.kv_of[qformat],) if qformat in self.kv_of else self.kv_formats
            for kv_format, pp, tp in product(kv_formats, self.pp, self.tp):
                yield Setup(
                    self.model, self.gpu, qformat, kv_format, self.sparse, tp, pp, self.framework,
                    group_size=group_instead(sizes.qformat, sizes.group_size, qformat),
                    gpu_weights_percent=sizes.gpu_weights_percent,
                )  # fmt: skip

    def check(self) -> None:
        """Refuse a question that no configuration can answer.

        Raises:
            UserError: a request is longer than the model's context, or than a limit that is given.
        """
        if self.longest > self.model.max_position_embeddings:
            worst = int((self.isl + self.osl).argmax())
            raise UserError(
                f"A request of {self.isl[worst]:,} input and {self.osl[worst]:,} output tokens is longer than the "
                f"context of {self.model.name}, {self.model.max_position_embeddings:,} tokens.",
                todo="Shorten workload.isl or workload.osl (a distribution needs a max), or choose another model.",
            )
        prompt = int(self.isl.max())
        for name, tokens in (("max_input_len", prompt), ("max_seq_len", self.longest)):
            given = getattr(self.terms.wanted, name)
            if given is not None and tokens > given:
                raise UserError(
                    f"The load has {'prompts' if tokens == prompt else 'requests'} of {tokens:,} tokens; "
                    f"build.{name}={given} does not hold them.",
                    todo=f"Leave build.{name} out, so that it is chosen for the load, or set {tokens} or more.",
                )


def setup_label(setup: Setup) -> str:
    """Return a short name of a configuration: "TP 2 fp8", "TP 8 PP 2 int4_awq, KV fp8"."""
    pp = f" PP {setup.pp}" if setup.pp > 1 else ""
    kv = "" if setup.kv_format is KvFormat.AUTO else f", KV {setup.kv_format}"
    return f"TP {setup.tp}{pp} {setup.qformat}{kv}"
