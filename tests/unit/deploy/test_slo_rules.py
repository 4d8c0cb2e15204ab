"""Alerts on an SLO, and TTFT as a metric of the HPA: on series that the service has, and as Prometheus judges them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

pytest.importorskip("prometheus_client")

from pipelines.deploy.commands import files
from pipelines.deploy.pods import ClusterDeployment
from pipelines.domain.benchmark import Slo
from pipelines.loadgen.config import PRESETS
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.metrics import ServiceMetrics
from pipelines.settings.compose import load
from tests.conftest import REFERENCE
from tests.support.deployments import KINDS, build, by_kind, deployed, templates, write
from tests.unit.deploy.test_manifests_written import manifests

SLO = Slo("given", ttft_ms=450, itl_ms=33.3, e2e_ms=2000)
ODD = Slo("given", ttft_ms=0.01, itl_ms=1 / 3, e2e_ms=86_400_000)
ALL_PRESETS = [Slo(name, *limits) for name, limits in PRESETS.items()]
OWN = 'app_kubernetes_io_instance="tiny-llama-fp8"'
SERIES = re.compile(r"(trtllm_\w+)\{([^}]*)\}")


def rules_of(made: ClusterDeployment, folder: Path) -> dict[str, Any]:
    return by_kind(build(write(made, folder)), "PrometheusRule")


@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_are_what_the_operator_takes_and_the_service_has_their_limits(kind: str, tmp_path: Path) -> None:
    made = deployed(tmp_path, kind, slo=SLO)
    things = build(write(made, tmp_path / "out"))
    schema = json.loads((REFERENCE / "kubernetes" / "prometheusrule.json").read_text())
    jsonschema.Draft7Validator(schema).validate(by_kind(things, "PrometheusRule"))
    server = templates(things)["server"]["spec"]["containers"]
    if kind == "multinode":
        words = next(one for one in server if one["name"] == "front")["command"]
        assert {"--slo-ttft-ms=450", "--slo-itl-ms=33.3", "--slo-e2e-ms=2000"} <= set(words)
    else:
        words = [word for word in server[0]["args"] if word.startswith("benchmark.slo.")]
        assert load(words).benchmark.slo.to_slo().limits == SLO.limits


@pytest.mark.parametrize("slo", [SLO, ODD, *ALL_PRESETS], ids=lambda slo: slo.name)
def test_every_series_and_edge_of_the_rules_is_one_that_the_service_has(slo: Slo, tmp_path: Path) -> None:
    metrics = ServiceMetrics("m", slo)
    metrics.failed(ApiError(503, "x"))
    page = metrics.page(None)
    group = rules_of(deployed(tmp_path, "cpu", slo=slo), tmp_path / "out")["spec"]["groups"][0]
    found = {series for rule in group["rules"] for series in SERIES.findall(rule["expr"]) if ":" not in series[0]}
    assert {name for name, _ in found if name.endswith("_bucket")}
    for name, labels in found - {series for series in found if "deployment=" in series[1]}:
        assert labels.startswith(OWN)
        edge = re.search(r'le="([^"]+)"', labels)
        assert re.search(rf"^{name}\{{{edge[0] if edge else ''}", page, re.MULTILINE), (name, labels)


def test_without_a_limit_or_an_operator_there_are_no_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("slo" in name for name in files(deployed(tmp_path, "cpu")))
    manifests(tmp_path / "b", "cpu", "manifests.pod_monitor=false", "benchmark.slo.preset=chat")
    assert not list((tmp_path / "b" / "out").rglob("slo-rules.yaml"))
    assert "note: no alerts for benchmark.slo, because manifests.pod_monitor=false" in capsys.readouterr().out
    manifests(tmp_path / "c", "cpu", "benchmark.slo.preset=chat")
    (file,) = (tmp_path / "c" / "out").rglob("slo-rules.yaml")
    assert 'le="0.2"' in file.read_text()


@pytest.fixture
def promtool() -> str:
    if (tool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return tool


def judged(promtool: str, made: ClusterDeployment, folder: Path, series: dict[str, str], alerts: list[str]) -> str:
    """Let Prometheus evaluate the rules for six hours; return what it finds wrong with the expected alerts."""
    rules = rules_of(made, folder / "out")["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    assert subprocess.run([promtool, "check", "rules", folder / "rules.yaml"], capture_output=True).returncode == 0
    own = f'{OWN},namespace="llm",pod="a"'
    expected = [
        {
            "exp_labels": {"alertname": "SloBudgetBurns", "deployment": made.name, "namespace": "llm"} | labels,
            "exp_annotations": {"summary": summary},
        }
        for labels, summary in map(json.loads, alerts)
    ]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name.replace("OWN", own), "values": values} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "6h", "alertname": "SloBudgetBurns", "exp_alerts": expected},
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", folder / "test.yaml"], capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def alert(severity: str, window: str, slo: str, limit: str, share: str) -> str:
    summary = f"tiny-llama-fp8: {slo} ({limit}) was missed by {share} of requests in {window}; 99 % must meet it."
    return json.dumps([{"severity": severity, "window": window, "slo": slo, "limit": limit}, summary])


TTFT = {
    'trtllm_time_to_first_token_seconds_bucket{OWN,le="0.45"}': "0+{within}x360",
    'trtllm_time_to_first_token_seconds_bucket{OWN,le="+Inf"}': "0+1000x360",
    "trtllm_time_to_first_token_seconds_count{OWN}": "0+1000x360",
}


def within(permille: int) -> dict[str, str]:
    """So many of a thousand answers a minute within the limit."""
    return {name: values.format(within=permille) for name, values in TTFT.items()}


BURNS = [("page", "1h", 14.4), ("page", "6h", 6), ("ticket", "1d", 3), ("ticket", "3d", 1)]


@pytest.mark.parametrize("missed", [0.5, 2, 5, 10, 50])
def test_an_alert_fires_once_the_budget_burns_as_fast_as_it_says(promtool: str, missed: float, tmp_path: Path) -> None:
    """At 99 %, 1 % missed is the whole budget in its 30 days and no more."""
    made = deployed(tmp_path, "cpu", slo=Slo("given", ttft_ms=450))
    share = f"{missed:g}%"
    alerts = [alert(severity, window, "ttft", "450 ms", share) for severity, window, factor in BURNS if missed > factor]
    assert judged(promtool, made, tmp_path, within(1000 - round(10 * missed)), alerts) == ""


def test_a_server_that_refuses_everything_has_no_latency_and_is_reported(promtool: str, tmp_path: Path) -> None:
    """429 and 5xx are the server's failures; a client's own mistakes are not."""
    made = deployed(tmp_path, "cpu", slo=Slo("given", ttft_ms=450))
    failing = {
        'trtllm_request_success_total{OWN,finished_reason="stop"}': "0+0x360",
        'trtllm_request_error_total{OWN,status="503",reason="unavailable"}': "0+7x360",
    }
    limit = "no failure of the server"
    alerts = [alert(severity, window, "answered", limit, "100%") for severity, window, _ in BURNS]
    assert judged(promtool, made, tmp_path, failing, alerts) == ""
    mistakes = {name.replace("503", "400"): values for name, values in failing.items()}
    assert judged(promtool, made, tmp_path, mistakes | within(1000), []) == ""


def test_another_objective_moves_the_thresholds(promtool: str, tmp_path: Path) -> None:
    """Half of 1 % missed is five times what 99.9 % leaves."""
    made = deployed(tmp_path, "cpu", slo=Slo("given", ttft_ms=450), slo_percent=99.9)
    texts = [alert(severity, window, "ttft", "450 ms", "0.5%") for severity, window, factor in BURNS if factor < 5]
    assert judged(promtool, made, tmp_path, within(995), [text.replace("99 %", "99.9 %") for text in texts]) == ""


def test_servers_are_added_for_ttft_where_it_is_asked_for(tmp_path: Path) -> None:
    made = deployed(tmp_path, "gpu", ttft_ms=500)
    spec = by_kind(build(write(made, tmp_path / "out")), "HorizontalPodAutoscaler")["spec"]
    targets = {one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"] for one in spec["metrics"]}
    assert targets["trtllm_mean_ttft_ms"] == "500"
    rules = yaml.safe_load((tmp_path / "out" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert {rule["name"]["as"] for rule in rules} == set(targets)
    rule = next(rule for rule in rules if rule["name"]["as"] == "trtllm_mean_ttft_ms")
    assert re.match(rule["name"]["matches"], rule["seriesQuery"].partition("{")[0])
    page = ServiceMetrics("m").page(None)
    for name in {rule["seriesQuery"].partition("{")[0], *re.findall(r"trtllm_\w+", rule["metricsQuery"])}:
        assert f"\n{name}{{" in page


def test_the_mean_ttft_of_an_idle_server_is_zero(promtool: str, tmp_path: Path) -> None:
    """Not NaN, for which the HPA would keep a server that nobody needs."""
    text = files(deployed(tmp_path, "gpu", ttft_ms=500))["prometheus-adapter.yaml"]
    query = yaml.safe_load(text)["rules"]["custom"][-1]["metricsQuery"]
    query = query.replace("<<.LabelMatchers>>", 'namespace="llm"').replace("<<.GroupBy>>", "pod")
    name = "trtllm_time_to_first_token_seconds"
    (tmp_path / "rules.yaml").write_text("groups: []\n")
    tests = []
    for seconds, answers, mean in (("0+0x10", "5+0x10", 0), ("0+3x10", "0+10x10", 300)):
        series = {f"{name}_sum": seconds, f"{name}_count": answers}
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'{key}{{namespace="llm",pod="a"}}', "values": values} for key, values in series.items()
                ],
                "promql_expr_test": [
                    {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": '{pod="a"}', "value": mean}]}
                ],
            }
        )
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
