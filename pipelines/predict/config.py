"""The group `sizing`: how many GPUs a load needs within limits. Imports nothing heavy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from pipelines.domain.errors import did_you_mean
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.units import rate_of_users
from pipelines.loadgen.config import Rate, SloSettings
from pipelines.settings.base import Group, Positive
from pipelines.settings.groups import choices

# The group `simulator`: settings of `make simulate`. Imports nothing heavy.

Policy = Literal["static", "inflight", "inflight_chunked", "one_prefill"]
POLICIES = get_args(Policy)
Time = Annotated[float, Field(gt=0)]


class SimulatorSettings(Group):
    """How an engine schedules requests, in ticks or in seconds.

    Attributes:
        policy: the policies compared, in the order shown.
        time: "auto" is seconds when a GPU is named or `sizing.fit` is given, ticks otherwise.
        slots: requests scheduled together; None is 4 in ticks, the engine's max_batch_size in seconds.
        prefill: ticks of a prompt.
        decode: ticks of a decode step.
        chunks: iterations that a prompt is spread over, in ticks.
        max_num_tokens: of an iteration; None is no limit in ticks, and in seconds the engine's, except for static.
        admission: as TensorRT-LLM's batch_scheduler_policy; None is the repository's, or the fit's.
        kv_blocks: of the paged KV cache; None is no limit in ticks, what fits into the GPU in seconds.
        tokens_per_block: of one; None is the build's, or the fit's.
        prefix_tokens: cached tokens of each prompt; None is 0 in ticks, the shared part of the prompts in seconds.
        until: when the run ends, ticks or seconds; None is when all requests are done.
        client_delay: closed loop: ticks or seconds from an answer to the arrival of the user's next request, beside
            workload.think_time_s; None is 0 in ticks, the performance model's in seconds.
        drawn: ticks or seconds that the picture of the slots shows; None chooses.
    """

    policy: tuple[Policy, ...] = ("static", "inflight")
    time: Literal["auto", "ticks", "seconds"] = "auto"
    slots: Positive | None = None
    prefill: Time = 2
    decode: Time = 1
    chunks: Positive = 1
    max_num_tokens: Positive | None = None
    admission: Literal["guaranteed_no_evict", "max_utilization"] | None = None
    kv_blocks: Positive | None = None
    tokens_per_block: Positive | None = None
    prefix_tokens: Annotated[int, Field(ge=0)] | None = None
    until: Time | None = None
    client_delay: Annotated[float, Field(ge=0)] | None = None
    drawn: Time | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_policy(cls, data: object) -> object:
        """Accept a single policy for a list, and name the nearest one for an unknown word."""
        if not isinstance(data, dict):
            return data
        policy = data.get("policy")
        policies = [policy] if isinstance(policy, str) else policy
        if isinstance(policies, list | tuple):
            for word in policies:
                if word not in POLICIES:
                    near = did_you_mean(str(word), POLICIES)
                    raise ValueError(f"has policy='{word}', which is none of {', '.join(POLICIES)}. {near}".strip(". "))
        return {**data, "policy": policies}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.policy:
            raise ValueError("has policy=[], which simulates nothing; give at least one")
        if len(set(self.policy)) < len(self.policy):
            raise ValueError(f"has policy=[{','.join(self.policy)}], which names one twice")
        return self


FITS = "fits"
"""Folder below the store in which `make calibrate` keeps its files."""
Signal = Literal["queue_time", "ttft", "kv_use"]
Mode = Literal["online", "sequential", "offline"]
Usd = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _percent(value: float) -> float:
    # 0.5 is probably a typo for 50, the median
    if not 1 <= value < 100:
        meant = f"; did you mean {100 * value:g}?" if 0 < value < 1 else ""
        raise ValueError(f"is {value:g}; percentiles go from 1 to 99.99, 50 is the median{meant}")
    return value


Percentile = Annotated[float, AfterValidator(_percent)]


def _both_or_none(settings: Group, one: str, other: str) -> None:
    stated = [key for key in (one, other) if getattr(settings, key) is not None]
    if len(stated) == 1:
        raise ValueError(
            f"has {stated[0]}={price_text(getattr(settings, stated[0]))} alone: {one} and {other} belong together"
        )


def fit_files(store: Path) -> list[Path]:
    """List the files of `make calibrate` in a store."""
    return sorted((store / FITS).glob("*.json"))


class SizingSloSettings(SloSettings):
    """Limits that a percentile of TTFT, ITL and E2E must meet, each separately.

    Attributes:
        percentile: the percentile of TTFT, ITL and E2E that must meet the limits, e.g. 95.
    """

    percentile: Percentile = 95


PriceOf = Usd | dict[str, Usd]
"""A price, or that of each GPU by its name in conf/hardware."""


def price_text(price: float | Mapping[str, float]) -> str:
    """Show a price."""
    return str(dict(price)) if isinstance(price, Mapping) else f"{price:g}"


class PriceSettings(Group):
    """Prices in USD; null means not given, and what is not given is not counted.

    Attributes:
        server_usd: to buy one server with its GPUs; {l40s: ..., h100_sxm: ...} where several GPUs are compared.
        years: of depreciation.
        licence_usd: software, per GPU and year.
        hosting_usd: per server and year.
        kwh_usd: of electricity.
        pue: power of the building over power of the machines.
        gpu_hour_usd: to rent one GPU for an hour, everything included; for several GPUs as above.
        utilisation: share of the fleet's capacity that is used over the year; null derives it from the average.
    """

    server_usd: PriceOf | None = None
    years: Rate | None = None
    licence_usd: Usd | None = None
    hosting_usd: Usd | None = None
    kwh_usd: Usd | None = None
    pue: Annotated[float, Field(ge=1)] | None = None
    gpu_hour_usd: PriceOf | None = None
    utilisation: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _both_or_none(self, "server_usd", "years")
        owned = ("server_usd", "licence_usd", "hosting_usd", "kwh_usd", "pue")
        if self.gpu_hour_usd is not None and (both := [key for key in owned if getattr(self, key) is not None]):
            rent, other = price_text(self.gpu_hour_usd), price_text(getattr(self, both[0]))
            raise ValueError(f"has gpu_hour_usd={rent} and {both[0]}={other}: rented or bought")
        _both_or_none(self, "kwh_usd", "pue")
        for key in ("server_usd", "gpu_hour_usd"):
            for name in value if isinstance(value := getattr(self, key), dict) else ():
                if name not in choices("hardware"):
                    near = did_you_mean(name, choices("hardware"))
                    raise ValueError(f"has {key} of '{name}', which is no choice of hardware. {near}".strip(". "))
        return self

    def of(self, gpu: str) -> Self:
        """Return the prices of one GPU, by its name in conf/hardware."""
        both = {key: getattr(self, key) for key in ("server_usd", "gpu_hour_usd")}
        own = {key: value.get(gpu) for key, value in both.items() if isinstance(value, dict)}
        return self.model_copy(update=own)


class AutoscalingSettings(Group):
    """Autoscaled instances over a day's load, compared with the fixed fleet.

    Attributes:
        day: the load of a day: 24 numbers, one per hour, of which only the ratios count; "business" is a built-in,
            assumed shape; "auto" is that of workload.trace where there is one, else business; null replays nothing.
        cold_start_s: from the decision until the new instance takes requests (engine load and what comes before).
        signal: that decides: time in the queue, TTFT, or use of the KV cache.
        up_at: add an instance when the signal is above this share of its limit: the TTFT limit, or the use of the KV
            cache at which an instance serves all it can within the limits.
        down_at: remove an instance when the signal is below this share.
        up_after_s: seconds that the signal must stay above.
        down_after_s: seconds that the signal must stay below.
        least: instances that always run.
        step_s: seconds between two checks of the signal.
    """

    day: Literal["auto", "business"] | tuple[Annotated[float, Field(ge=0)], ...] | None = None
    cold_start_s: Annotated[float, Field(ge=0)] | None = None
    signal: Signal = "kv_use"
    up_at: Rate = 0.7
    down_at: Rate = 0.35
    up_after_s: Annotated[float, Field(ge=0)] = 30
    down_after_s: Annotated[float, Field(ge=0)] = 600
    least: Positive = 1
    step_s: Rate = 10

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if isinstance(self.day, tuple) and len(self.day) != 24:
            raise ValueError(f"has day of {len(self.day)} numbers; give 24, one per hour")
        if isinstance(self.day, tuple) and not any(self.day):
            raise ValueError("has day of zeros: no load")
        if self.wanted and self.cold_start_s is None:
            raise ValueError(
                "has no cold_start_s: seconds until a new instance takes requests, as your cluster shows them"
            )
        if self.down_at >= self.up_at:
            raise ValueError(f"has down_at={self.down_at:g}, not below up_at={self.up_at:g}: the fleet would oscillate")
        return self

    @property
    def wanted(self) -> bool:
        """Whether there is a load to replay."""
        return self.day is not None


class SizingSettings(Group):
    """Question to the calculator, with lengths from `workload`, formats from `quant` and `kv_cache`, and `hardware`.

    Attributes:
        model: a model of pipelines/predict/performance/models.csv that has no file in conf/model; null is `model`.
        mode: "online": answers are streamed. "sequential": each is awaited whole, so that only E2E counts. "offline":
            nobody waits; throughput alone counts.
        average_rate: requests per second while the service is used.
        users: daily users, as an alternative to average_rate, with requests_per_user_day.
        requests_per_user_day: requests of each user per day.
        busy_hours: hours of a day in which the average holds.
        peak_rate: requests per second to size for, as measured.
        peak_factor: measured peak over average.
        peak_percentile: of Poisson arrivals in one second; null is 95 if nothing else states the peak.
        peak_window_s: of workload.trace, where no rate is given: the peak is that of its busiest so many seconds.
        slo: limits.
        headroom: share of each instance's rate that is kept free.
        spare: additional instances.
        tp: tensor parallel sizes to try; null is all that fit a server, or build.tp_size where it is above 1.
        pp: pipeline parallel sizes to try; null is build.pp_size.
        formats: weight formats to try; auto is all that the GPU can run, null the one of `quant`.
        kv_formats: KV-cache formats to try; null is the one of `kv_cache`.
        measured: a benchmark of yours to size from, of any tool that docs/benchmarking.md names.
        rate: requests per second that one instance (or server) serves within your limits, if you know it without a
            file.
        measured_gpus: GPUs that served `measured` or `rate`, all together; null is what the result says, or the ranks
            of `tp` and `pp`.
        fit: what `make calibrate` wrote: the performance model fitted to a benchmark, used instead of the one that is
            fitted to published measurements.
        requests: number of simulated requests per load.
        prices: of servers, GPUs, power and hosting.
        autoscaling: replay of a day with autoscaled instances.
    """

    model: str | None = None
    mode: Mode = "online"
    average_rate: Rate | None = None
    users: Rate | None = None
    requests_per_user_day: Rate | None = None
    busy_hours: Annotated[float, Field(gt=0, le=24)] = 24
    peak_rate: Rate | None = None
    peak_factor: Annotated[float, Field(ge=1)] | None = None
    peak_percentile: Percentile | None = None
    peak_window_s: Rate = 60
    slo: SizingSloSettings = Field(default_factory=SizingSloSettings)
    headroom: Share = 0
    spare: Annotated[int, Field(ge=0)] = 0
    tp: tuple[Positive, ...] | None = None
    pp: tuple[Positive, ...] | None = None
    formats: tuple[QFormat, ...] | None = None
    kv_formats: tuple[KvFormat, ...] | None = None
    measured: Path | None = None
    rate: Rate | None = None
    measured_gpus: Positive | None = None
    fit: Path | None = None
    requests: Annotated[int, Field(ge=200)] = 4000
    prices: PriceSettings = Field(default_factory=PriceSettings)
    autoscaling: AutoscalingSettings = Field(default_factory=AutoscalingSettings)

    @model_validator(mode="before")
    @classmethod
    def _one_of_a_list(cls, data: object) -> object:
        """Accept a single value for a list: `tp=2` means `[2]`."""
        if isinstance(data, dict):
            lists = ("tp", "pp", "formats", "kv_formats")
            data = {k: [v] if k in lists and isinstance(v, int | str) else v for k, v in data.items()}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._rates_fit()
        self._measured_fits()
        slo = self.slo.to_slo()
        if self.mode == "sequential" and (slo.ttft_ms or slo.itl_ms):
            raise ValueError(
                "has mode=sequential with a limit of TTFT or ITL, which nobody sees before the whole answer is there: "
                "limit sizing.slo.e2e_ms, or take mode=online"
            )
        if self.mode == "offline" and (slo.ttft_ms or slo.itl_ms or slo.e2e_ms):
            raise ValueError("has mode=offline with a limit of latency: offline, throughput alone counts")
        for key in ("tp", "pp", "formats", "kv_formats"):
            if getattr(self, key) == ():
                raise ValueError(f"has {key}=[], which tries nothing")
        if self.formats and "auto" in self.formats and len(self.formats) > 1:
            raise ValueError(
                f"has formats=[{','.join(self.formats)}]: auto already tries all that the GPU can run; give it alone"
            )
        return self

    def _measured_fits(self) -> None:
        if self.measured_gpus is not None and self.measured is None and self.rate is None:
            raise ValueError(
                f"has measured_gpus={self.measured_gpus} without anything measured: add measured=FILE or rate=..."
            )
        if self.rate is None:
            return
        for key in ("measured", "fit"):
            if (other := getattr(self, key)) is not None:
                raise ValueError(f"has rate={self.rate:g} and {key}={other}, two answers to what one serves: give one")
        slo = self.slo.to_slo()
        if limits := [key for key in ("ttft_ms", "itl_ms", "e2e_ms") if getattr(slo, key) is not None]:
            raise ValueError(
                f"has rate={self.rate:g} and slo.{limits[0]}={getattr(slo, limits[0]):g}, which a rate alone cannot be "
                "checked against: give the rate that is served within your limits, and leave the limits out"
            )

    def _rates_fit(self) -> None:
        _both_or_none(self, "users", "requests_per_user_day")
        if self.users is not None and self.average_rate is not None:
            raise ValueError(
                f"has average_rate={self.average_rate:g} and users={self.users:g}, two averages: give one of them"
            )
        peaks = [key for key in ("peak_rate", "peak_factor", "peak_percentile") if getattr(self, key) is not None]
        if len(peaks) > 1:
            stated = " and ".join(f"{key}={getattr(self, key):g}" for key in peaks)
            raise ValueError(f"has {stated}, two peaks: give one of them")
        if self.mode == "offline" and peaks:
            raise ValueError(f"has mode=offline and {peaks[0]}={getattr(self, peaks[0]):g}: offline there is no peak")
        average = self.average
        if average is not None and self.peak_rate is not None and self.peak_rate < average:
            raise ValueError(f"has peak_rate={self.peak_rate:g} below the average of {average:g} requests/s")
        if average is None and peaks and self.peak_rate is None:
            raise ValueError(f"has {peaks[0]} without an average: add average_rate, or users and requests_per_user_day")

    @property
    def average(self) -> float | None:
        """Average requests per second, or None when only a peak is given."""
        if self.users is not None and self.requests_per_user_day is not None:
            return rate_of_users(self.users, self.requests_per_user_day, self.busy_hours)
        return self.average_rate
