"""Workload and benchmark settings: what goes together and what does not."""

import pytest
from pydantic import ValidationError

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError
from pipelines.loadgen.config import BenchmarkSettings, LengthSettings, load_faults
from tests.support.load_settings import benchmark, workload

MIXTRAL = {"preset": "mlperf_mixtral_8x7b", "ttft_ms": None, "itl_ms": None, "e2e_ms": None}
UNIFORM = {"distribution": "uniform", "min": 3, "max": 5}


def test_a_number_is_a_fixed_length() -> None:
    """workload.isl=128 needs no more words."""
    assert workload(isl=77).isl == LengthSettings(distribution="fixed", mean=77)


def test_one_concurrency_needs_no_brackets() -> None:
    """benchmark.concurrency=8 is one level."""
    assert benchmark(concurrency=8).concurrency == (8,)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (0, "greater than or equal to 1"),
        (12.5, r"is 12\.5; a fixed length is a whole number"),
        ({"distribution": "normal", "mean": 8}, "'normal' needs stdev"),
        ({"distribution": "uniform", "min": 9, "max": 4}, "min=9 is above max=4"),
        ("abc", "'abc' is no length: give a number of tokens"),
        (UNIFORM | {"mean": 4}, "mean=4.0 conflicts with distribution 'uniform'"),
        ({"distribution": "empirical"}, "needs either values or file"),
        ({"distribution": "empirical", "values": []}, r"values=\[\] is empty"),
    ],
)
def test_a_length_that_cannot_be_drawn_is_refused(length: object, words: str) -> None:
    """The message names what is missing or too much."""
    with pytest.raises(ValidationError, match=words):
        workload(isl=length)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival": "trace"}, "needs workload.trace=FILE"),
        ({"trace": "x.jsonl", "arrival": "poisson"}, "arrival=poisson and trace=x.jsonl"),
        ({"columns": {"time": "ts"}}, "without a trace"),
        ({"trace": "x", "columns": {"tme": "ts"}}, "has tme; it takes time, isl, osl, prompt, session, delay and unit"),
        ({"trace": "x", "columns": {"unit": "h"}}, "has unit=h; it takes s, ms, us, ns"),
        ({"arrival": "poisson", "think_time_s": 2}, "think_time_s=2, which only a closed loop has"),
        ({"arrival": "trace", "trace": "x", "turns": 3}, "turns=3"),
    ],
)
def test_contradictions_inside_the_workload_are_refused(changes: dict[str, object], words: str) -> None:
    """Two keys that exclude each other are both named."""
    with pytest.raises(ValidationError, match=words):
        workload(**changes)


def test_later_keys_are_stored_only_where_they_say_something() -> None:
    """Results, keys of artifacts and nights of before stay comparable."""
    later = {"api", "repeats", "on_busy", "search", "search_attainment", "search_tolerance", "search_probes"}
    assert not later & benchmark().model_dump(mode="json").keys()
    assert benchmark(repeats=2).model_dump(mode="json")["repeats"] == 2
    assert not {"mix", "columns"} & workload().model_dump(mode="json").keys()
    mixed = workload(mix=[{"share": 0.5, "isl": 8, "osl": 8}])
    assert type(mixed).model_validate(mixed.model_dump(mode="json")) == mixed


def test_the_shares_of_a_mix_leave_some_for_the_rest() -> None:
    """Two halves and the workload's own lengths are more than everything."""
    part = {"share": 0.5, "isl": 8, "osl": 8}
    with pytest.raises(ValidationError, match="a mix whose shares add up to 1; isl and osl need some of 1"):
        workload(mix=[part, part])
    assert [round(each.share, 9) for each in workload(mix=[part]).parts] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": []}, r"concurrency=\[\]"),
        ({"duration_s": None}, "set benchmark.duration_s or benchmark.num_requests"),
        ({"metrics_url": "http://h:8002/metrics"}, "without url"),
        ({"url": "http://h:8000?a=1"}, "url='http://h:8000.a=1'; give host:port"),
        ({"url": "http://h/v1/chat/completions"}, "give it up to and with /v1"),
        ({"url": "h:8001", "api": "chat"}, "api=chat with url='h:8001', which is gRPC"),
        ({"api": "chat"}, "api=chat without url"),
        (
            {"model_name": "ensembel"},
            "model_name='ensembel' without url: a repository has ensemble and .*_bls; other names",
        ),
        ({"url": "h"}, "url='h'; give host:port"),
    ],
)
def test_contradictions_inside_the_benchmark_are_refused(changes: dict[str, object], words: str) -> None:
    """Two keys that exclude each other are both named."""
    with pytest.raises(ValidationError, match=words):
        benchmark(**changes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("soon", r"^benchmark.duration_s='soon' is not valid: it should be a valid number, or 'auto'\.$"),
        (0, r"^benchmark.duration_s='0' is not valid: it should be greater than 0, or 'auto'\.$"),
        ([6], r"^benchmark.duration_s='\[6\]' is not valid: it should be a valid number, or 'auto'\.$"),
    ],
)
def test_a_value_of_no_kind_is_refused_once(given: object, words: str) -> None:
    """A number or a word: what each kind wants is in one sentence, under the setting's own name."""
    values = {name: getattr(benchmark(), name) for name in BenchmarkSettings.model_fields}
    with pytest.raises(UserError, match=words):
        BenchmarkSettings.judged(values | {"duration_s": given}, "benchmark.")


@pytest.mark.parametrize(
    ("rate", "requests", "seconds"), [(0, None, 12), (5, None, 12), (10, None, 10), (40, None, 6), (40, 400, 10)]
)
def test_the_window_goes_on_until_enough_requests_have_finished(
    rate: float, requests: int | None, seconds: float
) -> None:
    """100, or as many as were asked for, between 6 and 12 s; a given length stays as it is."""
    assert (
        benchmark(num_requests=requests).seconds(rate) == benchmark(num_requests=requests).seconds(rate, 20) == seconds
    )
    assert benchmark(num_requests=requests, duration_s=20).seconds(rate) == 20
    assert benchmark(num_requests=9, duration_s=None).seconds(rate) is None
    assert benchmark().seconds(20, users=32) == 8  # 5 of each


@pytest.mark.parametrize(
    ("work", "how", "words"),
    [
        ({}, {"request_rate": [2, 4]}, r"benchmark.request_rate=\[2,4\] conflicts with workload.arrival=closed"),
        ({"arrival": "gamma"}, {"request_rate": 2, "concurrency": 8}, r"concurrency=\[8\] conflicts .*=gamma"),
        ({"arrival": "poisson"}, {}, "workload.arrival=poisson has no rate"),
        ({"arrival": "burst"}, {}, "burst has no number of requests"),
        ({"arrival": "burst"}, {"num_requests": 4, "request_rate": 2}, r"request_rate=\[2\] conflicts .*=burst"),
        ({}, {"streaming": False, "slo": MIXTRAL}, "streaming=false cannot measure"),
        ({"cv": 3}, {}, r"workload.cv=3\.0 has no effect on workload.arrival=closed: workload.arrival=gamma reads it"),
        ({"trace_speed": 2}, {}, r"workload.trace_speed=2\.0 has no effect .*: it is for workload.trace=FILE"),
        ({"image_side": 100}, {}, "workload.image_side=100 has no effect .*: it is for workload.images=1 or more"),
        (
            {"arrival": "poisson"},
            {"request_rate": 2, "warmup_requests": 5},
            "benchmark.warmup_requests=5 has no effect on workload.arrival=poisson: an open loop warms up",
        ),
        (
            {"arrival": "burst"},
            {"num_requests": 4, "duration_s": 9},
            r"benchmark.duration_s=9\.0 has no effect on workload.arrival=burst: a burst ends with its last response",
        ),
        ({}, {"min_requests": 20, "num_requests": 5}, "min_requests=20 is more than benchmark.num_requests=5"),
    ],
)
def test_contradictions_between_the_groups_are_found(
    work: dict[str, object], how: dict[str, object], words: str
) -> None:
    """What is asked and how it is measured must agree."""
    (fault,) = load_faults(workload(**work), benchmark(**how))
    with pytest.raises(ValueError, match=words):
        raise ValueError(str(fault))


def test_what_goes_together_has_no_faults() -> None:
    """The defaults, and an open loop with a rate."""
    assert load_faults(workload(), benchmark()) == []
    assert load_faults(workload(arrival="poisson"), benchmark(request_rate=[2, 4])) == []
    assert load_faults(workload(arrival="gamma", cv=3), benchmark(request_rate=2)) == []
    whole = benchmark(request_rate=2, warmup_requests=5, window="whole", num_requests=5)
    assert load_faults(workload(arrival="poisson"), whole) == []


def test_a_preset_gives_mlperfs_limits_and_own_limits_win() -> None:
    """Llama-2-70B server: p99 TTFT 2000 ms, TPOT 200 ms."""
    slo = {"preset": "mlperf_llama2_70b", "ttft_ms": None, "itl_ms": None, "e2e_ms": None}
    assert benchmark(slo=slo).slo.to_slo() == Slo("mlperf_llama2_70b", 2000, 200, None)
    changed = benchmark(slo=slo | {"itl_ms": 50}).slo.to_slo()
    assert changed == Slo("mlperf_llama2_70b, changed", 2000, 50, None)
    assert benchmark(slo=slo | {"preset": "none", "e2e_ms": 9}).slo.to_slo() == Slo("given", None, None, 9)
