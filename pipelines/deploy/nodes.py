"""Serve over several nodes: a LeaderWorkerSet whose leader starts one rank per GPU with mpirun over ssh.

Names of pods and hosts: LeaderWorkerSet `api/leaderworkerset/v1/leaderworkerset_types.go` (leader `<set>-<group>`,
workers `<set>-<group>-<index>`, both under the headless service `<set>`). Ranks and their flags: leader mode of
`scripts/launch_triton_server.py` of TensorRT-LLM's Triton backend, as on one node.
"""

from pathlib import Path

from pipelines.deploy.facts import PRE_STOP_S
from pipelines.deploy.pods import (
    IMAGE,
    REPOSITORY,
    ClusterDeployment,
    Object,
    container,
    container_ports,
    key_variable,
    pod,
    server_container,
    stop_later,
)
from pipelines.serving.command_lines import Ranks, front_command, server_command

FRONT_MEMORY = "1Gi"  # assumed: the process takes 150 MiB and holds up to 16 of the longest bodies
SSH_PORT = 2222
"""Above 1024, so that an unprivileged user may listen on it."""
MPIRUN = "/opt/hpcx/ompi/bin/mpirun"
"""Open MPI inside NVIDIA's image."""
CONFIG, KEYS = "/etc/pipelines/mpi", "/etc/pipelines/ssh"
FILES = Path(__file__).with_name("mpi")
"""ssh_config, sshd_config, wait.sh and drain.sh, which the overlay includes."""
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "HF_HUB_OFFLINE", "PYTHONDONTWRITEBYTECODE")
"""Variables of the leader that are passed to the ranks of other nodes, since sshd passes none."""


def leader_worker_set(deployed: ClusterDeployment) -> Object:
    """Make the set: every group is one server, and is recreated as a whole when one of its pods fails."""
    served = deployed.served
    spec = {
        **({} if deployed.autoscaled else {"replicas": deployed.settings.replicas}),
        "startupPolicy": "LeaderCreated",
        # Unlike a Deployment: a whole spare group of GPUs is rarely free.
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        "leaderWorkerTemplate": {
            "size": served.num_nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _leader(deployed),
            "workerTemplate": _worker(deployed),
        },
    }
    return deployed.object("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1", spec)


def hosts(deployed: ClusterDeployment) -> list[str]:
    """List the nodes of a group, leader first; Kubernetes fills in the leader's name."""
    workers = [f"$(POD_NAME)-{index}.{deployed.name}" for index in range(1, deployed.served.num_nodes)]
    return ["$(POD_NAME)", *workers]


def mpirun_command(deployed: ClusterDeployment) -> list[str]:
    """Return the leader's command: rank 0 answers, the other ranks run the engine."""
    served = deployed.served
    slots = ",".join(f"{host}:{served.gpus_per_node}" for host in hosts(deployed))
    launch = server_command(
        Path("tritonserver"),
        deployed.opened,
        deployed.serving.ports,
        repository=Path(REPOSITORY),
        shm_prefix="trtllm_pipelines_",
        ranks=Ranks(served.world_size),
        admin_key="$(POD_UID)",  # different in every pod, never shown outside the cluster
    )
    # mpirun applies folder (the engine's path is relative to it) and variables to one rank's arguments only.
    each = ["--wdir", REPOSITORY, *(word for name in (*PASSED_ON, *deployed.settings.env) for word in ("-x", name))]
    ranks: list[str] = []
    for word in launch.command[launch.command.index("-n") :]:
        ranks += [*each, word] if word == "tritonserver" else [word]
    return [
        MPIRUN,  # the absolute path tells the other nodes where Open MPI is
        "--host", slots,
        "--map-by", "slot",
        "--bind-to", "none",
        "--mca", "plm_rsh_agent", "ssh",
        "--mca", "plm_rsh_args", f"-F {CONFIG}/ssh_config",
        *ranks,
    ]  # fmt: skip


def _leader(deployed: ClusterDeployment) -> Object:
    main = server_container(deployed)
    drain = ["/bin/bash", f"{CONFIG}/drain.sh", str(PRE_STOP_S), str(deployed.sizes.drain_s)]
    del main["ports"]  # those of the service in front, as is the key
    main |= {"command": mpirun_command(deployed), "lifecycle": {"preStop": {"exec": {"command": drain}}}}
    main["env"] = [*_identity(), *(each for each in main["env"] if each not in key_variable(deployed))]
    wait: Object = {
        "name": "wait-for-workers",
        "image": IMAGE,
        "command": ["/bin/bash", f"{CONFIG}/wait.sh", f"{CONFIG}/ssh_config", *hosts(deployed)[1:]],
        "env": _identity(),
        "securityContext": main["securityContext"],
        "volumeMounts": [*_ssh_mounts(), {"name": "tmp", "mountPath": "/tmp"}],
    }
    main["volumeMounts"] = [*main["volumeMounts"], *_ssh_mounts()]
    return _with_ssh(pod(deployed, "server", main, [wait], [_front(deployed)]), deployed)


def _front(deployed: ClusterDeployment) -> Object:
    """Make the container through which everyone reaches the leader's tritonserver, which is open to its pod only."""
    made = container(deployed, "front")
    small = {"cpu": "1", "memory": FRONT_MEMORY}
    return made | {
        "command": front_command("python3", deployed.opened, deployed.serving.ports, REPOSITORY, deployed.slo),
        "env": [*made["env"], *key_variable(deployed)],
        "ports": container_ports(deployed),
        "resources": {"requests": small, "limits": {"memory": FRONT_MEMORY}},
        "lifecycle": stop_later(),
    }


def _worker(deployed: ClusterDeployment) -> Object:
    main = container(deployed, "worker")
    # Its ranks end with the leader's; until then the node must stay.
    stay = PRE_STOP_S + deployed.sizes.drain_s
    main |= {
        "command": ["/usr/sbin/sshd", "-D", "-e", "-f", f"{CONFIG}/sshd_config"],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(stay)]}}},
    }
    main["volumeMounts"] = [*main["volumeMounts"], *_ssh_mounts()]
    return _with_ssh(pod(deployed, "worker", main), deployed)


def _identity() -> list[Object]:
    fields = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _ssh_mounts() -> list[Object]:
    return [
        {"name": "mpi", "mountPath": CONFIG, "readOnly": True},
        {"name": "ssh", "mountPath": KEYS, "readOnly": True},
    ]


def _with_ssh(template: Object, deployed: ClusterDeployment) -> Object:
    template["spec"]["volumes"] += [
        {"name": "mpi", "configMap": {"name": f"{deployed.name}-mpi"}},
        {"name": "ssh", "secret": {"secretName": deployed.secrets["manifests.ssh_secret"][0], "defaultMode": 0o400}},
    ]
    return template
