"""A graph deployment of Dynamo: its frontend and router, and workers that run the LLM API.

Sources, of ai-dynamo/dynamo: the types of `deploy/operator/api/v1beta1` (v1alpha1 is deprecated there), the options of
`dynamo.trtllm` in ai-dynamo 1.5.0 and 1.6.1, `examples/backends/trtllm/deploy/v1beta1`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping

import yaml

from pipelines.deploy.pods import OPTIONS_FOLDER, REPOSITORY, ClusterDeployment, Object, container, options_name, pod
from pipelines.deploy.trtllm_serve import CONTEXT, GENERATION, beam_faults, role_files
from pipelines.domain.errors import Fault
from triton_repo.llmapi import CHECKPOINT_DIR, OPTIONS

PORT = 8000
"""Of the frontend, in the Service that the operator makes for it: NAME-frontend."""


def dynamo_faults(deployed: ClusterDeployment) -> Iterator[Fault]:
    """Yield what does not go together in a graph deployment."""
    llm_api = deployed.served.llm_api
    if llm_api is None:
        what = "manifests.operator=dynamo is for the LLM API, and the repository has a Triton server's models."
        yield Fault(what, todo="Write one with engine=tensorrt_llm_llmapi, or leave out manifests.operator.")
    elif deployed.settings.kv_routing and not llm_api.get("kv_cache_config", {}).get("enable_block_reuse", True):
        what = "manifests.kv_routing=true has no effect: the repository's enable_block_reuse is false."
        yield Fault(what, todo="Write it again without reuse=none, or leave out manifests.kv_routing.")
    yield from beam_faults(llm_api or {}, deployed.cluster)
    usual = type(deployed.serving)()
    for key in ("openai_port", "startup_timeout_s"):
        if (value := getattr(deployed.serving, key)) != getattr(usual, key):
            what = f"serving.{key}={value} has no effect on manifests.operator=dynamo: Dynamo's operator sets its own."
            yield Fault(what, todo="Leave it out.")
    if deployed.cluster.disaggregated and deployed.settings.replicas > 1:
        what = f"manifests.replicas={deployed.settings.replicas} has no effect beside cluster.prefill and decode."
        yield Fault(what, todo="Leave it out; these two are the numbers of workers.")


def option_files(deployed: ClusterDeployment) -> dict[str, str]:
    """Return the options of the workers, by file name: for all, or of those for prompts and for answers."""
    options: Mapping[str, object] = deployed.served.llm_api or {}
    return role_files(options, deployed.cluster) or {OPTIONS: yaml.safe_dump(dict(options), sort_keys=False)}


def graph(deployed: ClusterDeployment) -> Object:
    """Make the DynamoGraphDeployment."""
    components = [_component(deployed, "Frontend", "frontend", 1, _frontend(deployed)), *_workers(deployed)]
    return deployed.object(
        "DynamoGraphDeployment", "nvidia.com/v1beta1", {"backendFramework": "trtllm", "components": components}
    )


def _frontend(deployed: ClusterDeployment) -> Object:
    """Make the frontend's container: it reads the tokenizer where the workers do, and needs no GPU."""
    main = _main(deployed)
    main["resources"] = {"requests": {"cpu": "2", "memory": "4Gi"}}  # assumed
    main["env"] += [{"name": "DYN_ROUTER_MODE", "value": "kv"}] if deployed.settings.kv_routing else []
    return main


def _workers(deployed: ClusterDeployment) -> Iterator[Object]:
    cluster, events = deployed.cluster, ["--publish-kv-events"] if deployed.settings.kv_routing else []
    if not cluster.disaggregated:
        worker = _worker(deployed, OPTIONS, events)
        yield _component(deployed, "worker", "worker", deployed.settings.replicas, worker)
        return
    for kind, count, name, more in (  # the router follows the caches that prompts fill
        ("prefill", cluster.prefill, CONTEXT, events),
        ("decode", cluster.decode, GENERATION, []),
    ):
        yield _component(deployed, kind, kind, count, _worker(deployed, name, ["--disaggregation-mode", kind, *more]))


def _worker(deployed: ClusterDeployment, options: str, more: list[str]) -> Object:
    main = _main(deployed)
    model = ["--model", f"{REPOSITORY}/{CHECKPOINT_DIR}", "--served-model-name", deployed.served.label]
    main |= {
        "command": ["python3", "-m", "dynamo.trtllm"],
        "args": [*model, "--extra-engine-args", f"{OPTIONS_FOLDER}/{options}", *more],
        "workingDir": REPOSITORY,
    }
    main["env"].append({"name": "TRTLLM_NO_USAGE_STATS", "value": "1"})
    main["volumeMounts"].append({"name": "llm-api", "mountPath": OPTIONS_FOLDER, "readOnly": True})
    return main


def _main(deployed: ClusterDeployment) -> Object:
    """Make what the containers share; probes, ports, rights and /dev/shm are the operator's."""
    main = container(deployed, "main") | {"image": deployed.image_reference}
    del main["securityContext"]
    main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] == "repository"]
    return main


def _component(deployed: ClusterDeployment, name: str, kind: str, replicas: int, main: Object) -> Object:
    template = pod(deployed, kind, main)
    spec = template["spec"]
    for unknown in ("automountServiceAccountToken", "securityContext"):  # Dynamo's discovery asks the cluster
        del spec[unknown]
    for init in spec.get("initContainers", []):
        init["image"] = deployed.settings.fetch.image or deployed.image_reference
    needed = {mount["name"] for each in (main, *spec.get("initContainers", [])) for mount in each["volumeMounts"]}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] in needed]
    if kind == "frontend":
        spec.pop("nodeSelector", None)
        spec.pop("tolerations", None)
    else:  # Kustomize does not track names in this type, so this digest starts new pods when the options change
        spec["volumes"].append({"name": "llm-api", "configMap": {"name": options_name(deployed)}})
        digest = hashlib.sha256(json.dumps(option_files(deployed)).encode()).hexdigest()[:12]
        template["metadata"]["annotations"]["llm-api-options"] = digest
    shared = {} if kind == "frontend" else {"sharedMemorySize": f"{deployed.sizes.shm_mib}Mi"}
    return {"name": name, "type": kind, "replicas": replicas, **shared, "podTemplate": template}
