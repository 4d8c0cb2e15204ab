"""Objects around the pods: Service, PodDisruptionBudget, PodMonitor, HPA, and the rules for its metrics."""

from __future__ import annotations

from pipelines.deploy.deployment import FRONT, ClusterDeployment, Object

QUEUE_METRIC = "triton_queue_ms_per_request"
WAITING_METRIC = "trtllm_waiting_requests"
RATE_WINDOW = "2m"
"""Window of the rates: eight scrapes of the usual interval, so that a missed one does no harm."""


def workload(deployed: ClusterDeployment, template: Object) -> Object:
    """Make the Deployment of a server that fits one node."""
    spec = {
        **({} if deployed.autoscaled else {"replicas": deployed.settings.replicas}),
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": deployed.sizes.startup_limit_s + 300,
        # Start the new server before an old one ends: a cold start takes minutes.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": deployed.labels("server")},
        "template": template,
    }
    return deployed.object("Deployment", "apps/v1", spec)


def service(deployed: ClusterDeployment) -> Object:
    """Make one address for the pods that answer, inside the cluster only, because there is no authentication."""
    ports = []
    for key, port in deployed.exposed.items():
        name = key.removesuffix("_port")
        ports.append({"name": name, "port": port, "targetPort": name, "protocol": "TCP"})
    spec = {"type": "ClusterIP", "selector": deployed.labels("server"), "ports": ports}
    return deployed.object("Service", "v1", spec)


def network_policy(deployed: ClusterDeployment) -> Object:
    """Let in only what clients need; the pods of a group reach each other."""
    ingress: list[Object] = [{"ports": [{"port": port, "protocol": "TCP"} for port in deployed.exposed.values()]}]
    if deployed.served.kind == "multinode":
        ingress.append({"from": [{"podSelector": {"matchLabels": deployed.labels()}}]})
    spec = {"podSelector": {"matchLabels": deployed.labels()}, "policyTypes": ["Ingress"], "ingress": ingress}
    return deployed.object("NetworkPolicy", "networking.k8s.io/v1", spec)


def disruption_budget(deployed: ClusterDeployment) -> Object:
    """Let nodes be drained one server at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": deployed.labels()}}
    return deployed.object("PodDisruptionBudget", "policy/v1", spec)


def pod_monitor(deployed: ClusterDeployment) -> Object:
    """Tell Prometheus where to find the metrics of every server."""
    endpoint = {
        "port": FRONT.removesuffix("_port"),
        "path": "/metrics",
        "interval": f"{deployed.settings.scrape_interval_s}s",
    }
    spec = {
        "selector": {"matchLabels": deployed.labels("server")},
        "podTargetLabels": ["app.kubernetes.io/instance"],
        "podMetricsEndpoints": [endpoint],
    }
    return deployed.object("PodMonitor", "monitoring.coreos.com/v1", spec)


def autoscaler(deployed: ClusterDeployment) -> Object:
    """Make the HPA: one server more when requests wait, one less after a long quiet time.

    Two metrics, of which the worse decides: Triton's queue time ends when its model accepts a request, and both engines
    accept requests at once into a queue of their own.
    """
    settings, sizes = deployed.settings, deployed.sizes
    many = deployed.served.kind == "multinode"
    group, kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if many else ("apps/v1", "Deployment")
    one_in_a_while = {"type": "Pods", "value": 1}
    spec = {
        "scaleTargetRef": {"apiVersion": group, "kind": kind, "name": deployed.name},
        "minReplicas": settings.replicas,
        "maxReplicas": settings.max_replicas,
        "metrics": [
            _metric(QUEUE_METRIC, settings.queue_time_ms),
            _metric(WAITING_METRIC, settings.waiting_requests),
        ],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 60,
                "policies": [one_in_a_while | {"periodSeconds": sizes.scale_up_s}],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": sizes.scale_down_s,
                "policies": [one_in_a_while | {"periodSeconds": 300}],
            },
        },
    }
    return deployed.object("HorizontalPodAutoscaler", "autoscaling/v2", spec)


def _metric(name: str, value: int) -> Object:
    target = {"type": "AverageValue", "averageValue": str(value)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


def adapter_rules() -> Object:
    """Make the values of prometheus-adapter's Helm chart: the two metrics of the HPA, per pod.

    Queue counters cover all models, since a request may wait in front of each; they are divided by the requests that
    the engine finished, since every request passes it once.
    """
    resources = {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}}
    by = "sum by (<<.GroupBy>>)"
    queued = f"{by} (rate(nv_inference_queue_duration_us{{<<.LabelMatchers>>}}[{RATE_WINDOW}]))"
    done = f'{by} (rate(nv_inference_request_success{{<<.LabelMatchers>>,model="tensorrt_llm"}}[{RATE_WINDOW}]))'
    waiting = 'nv_trt_llm_request_metrics{<<.LabelMatchers>>,request_type="waiting"}'
    rules = [
        {
            "seriesQuery": 'nv_inference_queue_duration_us{namespace!="",pod!=""}',
            "resources": resources,
            "name": {"matches": "^nv_inference_queue_duration_us$", "as": QUEUE_METRIC},
            "metricsQuery": f"{queued} / 1000 / clamp_min({done}, 0.001)",
        },
        {
            "seriesQuery": 'nv_trt_llm_request_metrics{namespace!="",pod!="",request_type="waiting"}',
            "resources": resources,
            "name": {"matches": "^nv_trt_llm_request_metrics$", "as": WAITING_METRIC},
            "metricsQuery": f"{by} (avg_over_time({waiting}[{RATE_WINDOW}]))",
        },
    ]
    return {"rules": {"custom": rules}}
