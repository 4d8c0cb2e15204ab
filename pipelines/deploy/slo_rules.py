"""A PrometheusRule that warns when requests miss the limits of `benchmark.slo` faster than its objective allows.

Windows and factors are those of the Site Reliability Workbook, chapter 5 (multiwindow, multi-burn-rate alerts), for a
budget of 30 days: 2 % of it in an hour or 5 % in six call somebody, 10 % in one or three days open a ticket. The short
window ends an alert soon after its cause.
"""

from pipelines.deploy.pods import ClusterDeployment, Object

BURNS = (("1h", "5m", 14.4, "page"), ("6h", "30m", 6.0, "page"),
         ("1d", "2h", 3.0, "ticket"), ("3d", "6h", 1.0, "ticket"))  # fmt: skip
"""Long window, short window, factor of the rate that spends the budget in 30 days, severity."""
HISTOGRAMS = {
    "ttft": "trtllm_time_to_first_token_seconds",
    "itl": "trtllm_time_per_output_token_seconds",
    "e2e": "trtllm_e2e_request_latency_seconds",
}
"""Limit of `benchmark.slo` -> histogram of the service, which has the limit as the edge of a bucket."""
MISSED = "trtllm_slo_missed:ratio_rate"


def slo_rules(deployed: ClusterDeployment) -> Object:
    """Make the rules: for each limit the share of requests beyond it over each window, and four alerts on the shares.

    Requests that fail have no latency; their share is one more objective, `answered`.
    """
    windows = sorted({window for burn in BURNS for window in burn[:2]})
    shares = [share for window in windows for share in _shares(deployed, window)]
    groups = [{"name": f"{deployed.name}-slo", "rules": [*shares, *(_alert(deployed, *burn) for burn in BURNS)]}]
    return deployed.object("PrometheusRule", "monitoring.coreos.com/v1", {"groups": groups}, f"{deployed.name}-slo")


def _shares(deployed: ClusterDeployment, window: str) -> list[Object]:
    own = f'app_kubernetes_io_instance="{deployed.name}"'

    def rate(series: str, more: str = "") -> str:
        return f"sum by (namespace) (rate({series}{{{own}{more}}}[{window}]))"

    def record(name: str, limit: str, expr: str) -> Object:
        labels = {"deployment": deployed.name, "slo": name, "limit": limit}
        return {"record": f"{MISSED}{window}", "expr": expr, "labels": labels}

    shares = []
    for name, limit in deployed.slo.limits_s.items():
        histogram, bound = HISTOGRAMS[name], f"{deployed.slo.limits[name]:.12g} ms"
        within, all_answers = rate(f"{histogram}_bucket", f',le="{limit!r}"'), rate(f"{histogram}_count")
        shares.append(record(name, bound, f"1 - {within} / {all_answers}"))
    failed = rate("trtllm_request_error_total", ',status=~"429|5.."')
    answered = rate("trtllm_request_success_total")
    return [*shares, record("answered", "no failure of the server", f"{failed} / ({failed} + {answered})")]


def _alert(deployed: ClusterDeployment, long: str, short: str, factor: float, severity: str) -> Object:
    objective = deployed.settings.slo_percent
    most = f"{factor * (100 - objective) / 100:.6g}"
    over = [f'{MISSED}{window}{{deployment="{deployed.name}"}} > {most}' for window in (long, short)]
    return {
        "alert": "SloBudgetBurns",
        "expr": " and ".join(over),
        "labels": {"severity": severity, "window": long},
        "annotations": {
            "summary": f"{{{{ $labels.deployment }}}}: {{{{ $labels.slo }}}} ({{{{ $labels.limit }}}}) was missed by "
            f"{{{{ $value | humanizePercentage }}}} of requests in {long}; {objective:g} % must meet it."
        },
    }
