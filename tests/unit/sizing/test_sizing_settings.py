"""What is asked of the calculator, and what it refuses."""

import pytest

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError
from pipelines.predict.sizing.question import demand_of
from pipelines.settings.compose import load
from tests.support.load_settings import workload


def sizing(*overrides):
    return load([f"sizing.{text}" for text in overrides]).sizing


@pytest.mark.parametrize(
    ("given", "peak", "how"),
    [
        (["average_rate=64"], 77, "P95 of Poisson arrivals in one second"),
        (["average_rate=64", "peak_percentile=50"], 64, "P50 of Poisson"),
        (["average_rate=7"], 12, "P95"),
        (["average_rate=0.06"], 1, "P95 of Poisson arrivals in one second"),
        (["average_rate=0.01"], 1, "P95 of Poisson arrivals in one second is 0, but a request takes one"),
        (["average_rate=40", "peak_factor=1.5"], 60, "1.5 x the average"),
        (["peak_rate=31"], 31, "as given"),
        (["average_rate=20", "peak_rate=31"], 31, "as given"),
        (["users=678720", "requests_per_user_day=3", "busy_hours=8"], 85, "P95"),  # 70.7/s
        (["mode=offline", "average_rate=64"], 64, "offline"),
    ],
)
def test_the_peak_that_is_sized_for(given, peak, how):
    demand = demand_of(sizing(*given), workload())
    assert demand.peak == peak
    assert how in demand.how


def test_without_a_rate_there_is_no_demand():
    with pytest.raises(UserError, match="There is no load to size for"):
        demand_of(sizing(), workload())


@pytest.mark.parametrize(
    ("given", "peak", "how"),
    [
        (["peak_window_s=5"], 2.0, "busiest 5 s of the trace"),
        (["peak_window_s=1"], 4.0, "busiest 1 s of the trace"),
        ([], 0.22, "busiest 50 s of the trace"),  # all of it
        (["mode=offline"], 0.22, "the average of the trace"),
        (["peak_rate=3"], 3.0, "peak as given"),
        (["average_rate=1"], 3.0, "P95"),
    ],
)
def test_a_trace_has_its_own_rate_unless_one_is_given(tmp_path, given, peak, how):
    """12 requests in 50 s: ten of them in 2.25 s, four of these in each second."""
    file = tmp_path / "trace.csv"
    file.write_text("time,isl,osl\n" + "".join(f"{at},8,2\n" for at in (0, *(20 + n / 4 for n in range(10)), 50)))
    demand = demand_of(sizing(*given), workload(trace=file))
    assert demand.peak == pytest.approx(peak)
    assert how in demand.how


def test_requests_that_come_at_once_have_no_rate(tmp_path):
    (tmp_path / "trace.csv").write_text("time,isl,osl\n1,8,2\n1,8,2\n")
    with pytest.raises(UserError, match="has no rate: all its requests come at once"):
        demand_of(sizing(), workload(trace=tmp_path / "trace.csv"))


def test_turns_that_wait_for_an_answer_have_no_rate_unless_one_is_given(tmp_path):
    work = workload(trace=tmp_path / "trace.csv", columns={"session": "who", "delay": "pause"})
    work.trace.write_text("time,who,pause,isl,osl\n1,a,,8,2\n,a,3,8,2\n")
    with pytest.raises(UserError, match=r"has 1 turn with a delay .* Give the rate, sizing.peak_rate="):
        demand_of(sizing(), work)
    assert demand_of(sizing("peak_rate=3"), work).peak == 3


def test_daily_users_are_an_average():
    assert sizing("users=678720", "requests_per_user_day=3", "busy_hours=8").average == pytest.approx(70.7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["average_rate=0"], r"sizing\.average_rate='0' is not valid: .*greater than 0"),
        (["average_rate=-3"], r"sizing\.average_rate='-3' is not valid"),
        (["peak_rate=-1"], r"sizing\.peak_rate='-1' is not valid"),
        (["average_rate=5", "users=100", "requests_per_user_day=3"], r"average_rate=5 and users=100, two averages"),
        (["average_rate=5", "users=100", "requests_per_user_day=3", "peak_rate=9"], "two averages"),
        (["users=100"], r"has users=100 alone"),
        (["requests_per_user_day=3"], r"has requests_per_user_day=3 alone"),
        (["average_rate=5", "peak_rate=9", "peak_factor=2"], r"peak_rate=9 and peak_factor=2, two peaks"),
        (["average_rate=50", "peak_rate=9"], r"peak_rate=9 below the average of 50"),
        (["peak_factor=2"], r"peak_factor without an average"),
        (
            ["average_rate=5", "peak_percentile=0.95"],
            r"sizing\.peak_percentile is 0\.95; percentiles go from 1 .* did you mean 95\?",
        ),
        (
            ["slo.percentile=0.5"],
            r"sizing\.slo\.percentile is 0\.5; percentiles .* 50 is the median; did you mean 50\?",
        ),
        (["slo.percentile=100"], r"is 100; percentiles go from 1 to 99\.99"),
        (["mode=sequential", "slo.ttft_ms=500"], r"mode=sequential with a limit of TTFT"),
        (["mode=offline", "slo.e2e_ms=500"], r"mode=offline with a limit of latency"),
        (["mode=offline", "average_rate=5", "peak_factor=2"], r"mode=offline and peak_factor=2"),
        (["headroom=1"], r"sizing\.headroom='1' is not valid"),
        (["spare=-1"], r"sizing\.spare='-1' is not valid"),
        (["tp=[]"], r"tp=\[\], which tries nothing"),
        (["formats=[fp9]"], r"sizing\.formats\.0='fp9' is not known\. Choose one of .*Did you mean 'fp8'"),
        (["mode=streaming"], r"sizing\.mode='streaming' is not known"),
        (["prices.server_usd=1000"], r"has server_usd=1000 alone"),
        (["prices.gpu_hour_usd=2", "prices.licence_usd=4500"], r"gpu_hour_usd=2 and licence_usd=4500"),
        (["prices.kwh_usd=0.1"], r"has kwh_usd=0\.1 alone"),
        (["prices.utilisation=1.2"], r"utilisation='1\.2' is not valid"),
        (["autoscaling.day=[1,2]", "autoscaling.cold_start_s=9"], r"day of 2 numbers; give 24"),
        (["autoscaling.day=business"], r"has no cold_start_s"),
        (["autoscaling.up_at=0.3"], r"down_at=0\.35, not below up_at=0\.3"),
        (["avrage_rate=3"], r"'sizing\.avrage_rate' is not a known setting\. Did you mean 'sizing\.average_rate'"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        sizing(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("day=leisure", r"^sizing.autoscaling.day='leisure' is not valid: .* 'auto' or 'business', or a list\.$"),
        ("day=[1,-2]", r"^sizing.autoscaling.day.1='-2' is not valid: input should be greater than or equal to 0\.$"),
    ],
)
def test_a_day_is_a_word_or_a_list(given, message):
    """One sentence for both kinds; a list with a fault in it is a list."""
    with pytest.raises(UserError, match=message):
        sizing(f"autoscaling.{given}")


def test_presets_of_limits():
    assert sizing("slo.preset=chat").slo.to_slo() == Slo("chat", None, 200, None)
    assert sizing("slo.preset=chat_fast").slo.to_slo() == Slo("chat_fast", None, 90, None)
    assert sizing("slo.preset=mlperf_llama2_70b").slo.to_slo() == Slo("mlperf_llama2_70b", 2000, 200, None)


def test_one_value_is_a_list_of_one():
    assert sizing("tp=2", "formats=fp8").tp == (2,)
