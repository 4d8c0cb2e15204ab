"""The group `manifests`: what `make manifests` cannot derive from the repository."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from pipelines.settings.base import Group, Positive

# The group `cluster`: what `make scripts` cannot derive from the deployment.

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,|&+/@:*()\[\]-]+$")]
"""A name without spaces or quotes."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ClusterSettings(Group):
    """Where an engine is built and served when one machine is not enough, or is not this one.

    Attributes:
        kind: what starts the ranks: Slurm's srun, or Open MPI's mpirun over ssh.
        folder: where the scripts are written, in one folder per deployment.
        python: interpreter that runs this project on the nodes; None is that of this environment.
        server: tritonserver on the nodes.
        env: variables of every rank.
        hosts: names of the nodes, for mpirun.
        partition: for Slurm, like the following ones; None leaves it to the cluster.
        account: that is charged.
        qos: quality of service.
        constraint: features a node must have.
        cpus_per_gpu: processors per rank.
        build_minutes: time limit of the build.
        serve_minutes: time limit of the server.
        srun_mpi: interface between srun and Open MPI.
        image: a container image, for Slurm with Pyxis.
        mounts: further folders of that container.
        prefill: servers of the LLM API for prompts alone, each on a node; 0 is one server for prompts and answers.
        decode: servers for answers alone; they get the KV cache of a prompt from the others.
    """

    LATER: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    kind: Literal["none", "slurm", "mpi"] = "none"
    folder: Path = Path("cluster")
    python: str | None = None
    server: Path = Path("/opt/tritonserver/bin/tritonserver")
    env: dict[str, str] = Field(default_factory=dict)
    hosts: tuple[Word, ...] = ()
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    cpus_per_gpu: Positive = 8
    build_minutes: Positive = 480
    serve_minutes: Positive = 1440
    srun_mpi: Word = "pmix"
    image: str | None = None
    mounts: tuple[Path, ...] = ()
    prefill: Annotated[int, Field(ge=0, le=256)] = 0
    decode: Annotated[int, Field(ge=0, le=256)] = 0

    @property
    def disaggregated(self) -> bool:
        """Whether prompts and answers have servers of their own."""
        return self.prefill + self.decode > 0

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(f"has prefill={self.prefill} and decode={self.decode}: both are 0, or both at least 1")
        if twice := [host for host in self.hosts if self.hosts.count(host) > 1]:
            raise ValueError(f"has {twice[0]} twice in hosts: each is a node of its own")
        return self

    @field_validator("env")
    @classmethod
    def _are_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' is no name of a variable: letters, digits and _ only")
        return env


# The group `image`: how `make image` builds a container image and `make shell` runs it.

UserId = Annotated[int, Field(ge=1, le=2**31 - 2)]
"""Never 0, because the image must not run as root."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([._:/-]+[a-z0-9]+)*$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]

OF_A_RELEASE = r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?"
OLD_DRAFT_WORD = (1, 3, 0, 3)
"""1.2.1 and 1.3.0rc3 reject `decoding_type: Draft_Target`, which is the only word for a draft model from 1.3.0rc8.

Which of rc4 to rc8 changed it is unknown; all of them count as changed.
"""


class ImageSettings(Group):
    """One image of two: the CPU engine's, or NVIDIA's Triton container with this project on top.

    A third, NVIDIA's release of TensorRT-LLM, runs what is made for the LLM API, and nothing is built on it.

    Attributes:
        tool: that builds and runs the image; auto is docker, else podman.
        name: of the image, with the registry it is pushed to, without a tag.
        tag: None is the version and the flavour: 0.1.0-gpu.
        base_cpu: what the CPU image is built on.
        base_gpu: what the GPU image is built on; the tag fixes TensorRT-LLM's version.
        base_llm_api: NVIDIA's container with `trtllm-serve`, which runs what engine=tensorrt_llm_llmapi makes; its tag
            also decides which options there are, and how a draft model is called in the arguments.
        digest: of that base, so that a tag that moves changes nothing.
        uid: of the user inside; owns the folders it writes to.
        gid: its group.
        torch_index: package index with torch without CUDA for the CPU image; None is pip's default index, whose torch
            includes CUDA (some gigabytes that the CPU image does not need).
        pip_config: a pip.conf (a private index with its password); a secret of one build step, stored in no layer.
        dev: whether to install the tools of the tests as well, for `make test-gpu` in the shell.
        no_cache: whether to build every step again.
        shm_size: of /dev/shm; NCCL and Triton's python backend exchange tensors there.
        network: `host` makes a server in the shell reachable on this machine's loopback.
    """

    tool: Literal["auto", "docker", "podman"] = "auto"
    name: Name = "trtllm-pipelines"
    tag: Tag | None = None
    base_cpu: str = "docker.io/library/python:3.11-slim-bookworm"
    base_gpu: str = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    base_llm_api: str = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20"
    digest: Digest | None = None
    uid: UserId = 1000
    gid: UserId = 1000
    torch_index: str | None = None
    pip_config: Path | None = None
    dev: bool = False
    no_cache: bool = False
    shm_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*[kmg]$")] = "8g"
    network: Literal["host", "bridge"] = "host"

    @field_validator("base_cpu", "base_gpu", "base_llm_api")
    @classmethod
    def _has_a_tag(cls, base: str) -> str:
        """Require a tag: without one the builder uses `latest`, which changes over time."""
        if "@" in base:
            raise ValueError(f"'{base}' carries a digest: give it as image.digest=sha256:...")
        if ":" not in base.rsplit("/", 1)[-1] or base.endswith(":latest"):
            raise ValueError(f"'{base}' names no version: give it with its tag, such as 26.07-trtllm-python-py3")
        return base

    @property
    def llm_api_version(self) -> str | None:
        """The version of TensorRT-LLM that the tag of `base_llm_api` says; None if it says none."""
        version = re.match(OF_A_RELEASE, self.base_llm_api.rpartition(":")[2])
        return version and version[0]

    @property
    def draft_word(self) -> Literal["DraftTarget", "Draft_Target"]:
        """Return what this TensorRT-LLM calls a draft model; a tag without its version counts as a newer one."""
        version = re.match(OF_A_RELEASE, self.base_llm_api.rpartition(":")[2])
        numbers = tuple(int(part or 10**6) for part in version.groups()) if version else (10**6,)
        return "DraftTarget" if numbers <= OLD_DRAFT_WORD else "Draft_Target"

    @field_validator("pip_config")
    @classmethod
    def _is_there(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"'{path}' is not a file: give a pip.conf, or null")
        return path.absolute() if path else None


ObjectName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""A Kubernetes name that leaves room for suffixes (63 characters in all)."""
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Gib = Annotated[float, Field(gt=0)]
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""A label's value, and its name without the prefix."""
PREFIX = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
SECRET_WORDS = re.compile("token|password|passwd|secret|credential|api_?key", re.IGNORECASE)


FROM_HUB = 'hf download "$@" --local-dir /repository && rm -rf /repository/.cache /repository/.gitattributes'
"""What the Hub and its client add must go again: Triton takes each folder for a model, and added files are refused."""


class FetchSettings(Group):
    """An init container that puts the repository into an empty folder before the server starts.

    Attributes:
        hub: a repository of the Hub that holds the folder: org/name, or org/name@revision (a commit, tag or branch).
        command: any other way: program and arguments; it fills /repository.
        image: None is the server's own, which has the Hub's client.
        secret: a Secret whose keys become variables of this container alone, e.g. keys of an object store.
    """

    hub: Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?$")] | None = None
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    image: str | None = None
    secret: SecretName | None = None

    @property
    def words(self) -> tuple[str, ...] | None:
        """Command of the container; None if nothing is fetched."""
        if self.hub is not None:
            name, _, revision = self.hub.partition("@")
            pinned = ("--revision", revision) if revision else ()
            return ("sh", "-c", FROM_HUB, "hf", name, *pinned)
        return self.command

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.hub is not None and self.command is not None:
            raise ValueError(f"hub '{self.hub}' and command are two ways to fetch one repository: leave out one")
        return self


class RouteSettings(Group):
    """An HTTPRoute of the Gateway API, by which a new version takes over from an old one.

    Attributes:
        name: of the route, the same for all versions; None writes none.
        gateway: name of the Gateway that it hangs on.
        hostname: that clients use; None is every name of the gateway.
        beside: name of the deployment that keeps the rest of the requests (`manifests.name` of the old version).
        weight: percent of the requests that go to this deployment.
    """

    name: ObjectName | None = None
    gateway: ObjectName | None = None
    hostname: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")] | None = None
    beside: ObjectName | None = None
    weight: Annotated[int, Field(ge=0, le=100)] = 100

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.name is None) != (self.gateway is None):
            raise ValueError(f"has name={self.name} and gateway={self.gateway}: a route needs both")
        if self.name is None and (self.beside is not None or self.hostname is not None):
            raise ValueError("has no name: give the one that all versions share, and gateway")
        if self.beside is None and self.weight != 100:
            raise ValueError(f"has weight={self.weight} and no beside: name the deployment that gets the rest")
        return self


class ManifestSettings(Group):
    """Kustomize output, and choices of the cluster.

    Attributes:
        operator: dynamo writes a graph deployment for the operator of NVIDIA Dynamo, where `cluster.prefill` and
            `cluster.decode` give prompts and answers their own workers; none writes Kubernetes' own objects.
        kv_routing: whether Dynamo's router sends a request to the worker that has most of its prompt in the KV cache.
        preview: write them without the repository, on a machine without a GPU: sizes are the plan's, and each file says
            that it is a preview.
        folder: where the output goes; one folder per deployment below it.
        name: of all objects; None is model and format: gemma-2b-fp8.
        namespace: None leaves it to kubectl.
        image: with tag or digest; None is what `make image` builds.
        image_pull_secret: a Secret for a private registry.
        replicas: servers (or groups of nodes) at least.
        max_replicas: at most; with more than `replicas` an HPA is written. None is 4, or `replicas` if that is more.
        queue_time_ms: time a request waits in Triton's queues, on average over a server, above which one is added.
        waiting_requests: requests that wait inside the engine, per server, above which one is added.
        ttft_ms: mean TTFT of a server's streamed answers, above which one is added; None adds none for it.
        slo_percent: share of requests that must meet each limit of benchmark.slo; alerts tell how fast it is missed.
        pod_monitor: write a PodMonitor, and the alerts; needs the Prometheus operator's types in the cluster.
        storage: where the repository is: a claim, a folder on the node, or an empty folder that `fetch` fills.
        claim: name of an existing claim; None writes one.
        storage_class: of the claim that is written; None is the cluster's default.
        access_mode: of that claim; servers on several nodes need one of the ...Many modes.
        host_path: absolute folder on the nodes.
        sub_path: folder of the repository inside that storage; empty is its root.
        fetch: see `FetchSettings`.
        route: see `RouteSettings`.
        hf_token_secret: a Secret with the key `token`; the fetch container gets it as HF_TOKEN.
        env: further variables of the server, never secrets.
        cpus: None is engine.openvino.num_threads or 4 on the CPU, 4 and 2 for each GPU otherwise (assumed).
        memory_gib: None is computed, see `pipelines.deploy.facts`.
        shm_gib: size of /dev/shm; None is computed.
        node_selector: labels that the nodes must have, besides those that follow from `hardware`.
        extra_resources: further countable devices per pod, e.g. {rdma/ib: 8}.
        runtime_class: e.g. nvidia, if the GPU operator did not make it the default.
        ssh_secret: Secret with the ssh keys of a group's nodes; None is the deployment's name and -mpi-ssh.
    """

    LATER: ClassVar[tuple[str, ...]] = ("operator", "kv_routing", "preview", "route")

    operator: Literal["none", "dynamo"] = "none"
    kv_routing: bool = False
    preview: bool = False
    folder: Path = Path("manifests")
    name: ObjectName | None = None
    namespace: ObjectName | None = None
    image: Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")] | None = None
    image_pull_secret: SecretName | None = None
    replicas: Positive = 1
    max_replicas: Positive | None = None
    queue_time_ms: Positive = 200
    waiting_requests: Positive = 4
    ttft_ms: Positive | None = None
    slo_percent: Annotated[float, Field(ge=95, lt=100)] = 99
    pod_monitor: bool = True
    storage: Literal["claim", "host_path", "empty_dir"] = "claim"
    claim: SecretName | None = None
    storage_class: SecretName | None = None
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"] = "ReadWriteMany"
    host_path: Annotated[str, Field(pattern=r"^/")] | None = None
    sub_path: Annotated[str, Field(pattern=r"^([^/].*)?$")] = ""
    fetch: FetchSettings = Field(default_factory=FetchSettings)
    route: RouteSettings = Field(default_factory=RouteSettings)
    hf_token_secret: SecretName | None = None
    env: dict[str, str] = Field(default_factory=dict)
    cpus: Positive | None = None
    memory_gib: Gib | None = None
    shm_gib: Gib | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    extra_resources: dict[str, Positive] = Field(default_factory=dict)
    runtime_class: SecretName | None = None
    ssh_secret: SecretName | None = None

    @property
    def most(self) -> int:
        """Servers at most."""
        return self.max_replicas or max(4, self.replicas)

    def object_name(self, label: str, variant: str) -> str:
        """Return `name`, or the model's and the format's as a Kubernetes name.

        That is lower case, digits and single dashes, a letter first, at most 40 characters.
        """
        if self.name is not None:
            return self.name
        name = re.sub(r"[^a-z0-9]+", "-", f"{label}-{variant}".lower()).strip("-")
        return (name if name[:1].isalpha() else f"m-{name}")[:40].strip("-")

    def secrets(self, name: str, *, api_key: bool, over_nodes: bool) -> dict[str, tuple[str, str]]:
        """Return the Secrets that the pods need, by the setting that asks for them: its name, and what is in it."""
        needed = {
            "manifests.image_pull_secret": (self.image_pull_secret, "of type kubernetes.io/dockerconfigjson"),
            "manifests.fetch.secret": (self.fetch.secret, "variables of the fetch container"),
            "manifests.hf_token_secret": (self.hf_token_secret, "key `token`, the Hub's"),
            "serving.api_key": (f"{name}-api-key" if api_key else None, "key `api_key`, which clients must send"),
            "manifests.ssh_secret": (
                (self.ssh_secret or f"{name}-mpi-ssh") if over_nodes else None,
                "keys `id_ed25519`, `authorized_keys`, `ssh_host_ed25519_key` and `known_hosts`, the group's own",
            ),
        }
        return {setting: (secret, what) for setting, (secret, what) in needed.items() if secret is not None}

    @staticmethod
    def gpu_labels(capability: float) -> dict[str, str]:
        """Return the labels that GPU feature discovery gives to nodes with GPUs of a capability, such as 9.0."""
        major, minor = divmod(round(capability * 10), 10)
        return {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}

    @field_validator("env")
    @classmethod
    def _has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        if names := sorted(name for name in env if SECRET_WORDS.search(name)):
            raise ValueError(
                f"'{', '.join(names)}' looks like a secret, and manifests are kept in git: put it into a Secret and "
                "name that in manifests.fetch.secret or manifests.hf_token_secret"
            )
        return env

    @field_validator("host_path", "sub_path")
    @classmethod
    def _stays_below(cls, path: str | None) -> str | None:
        if path is not None and ".." in path.split("/"):
            raise ValueError(f"'{path}' contains '..', which Kubernetes refuses: write the folder itself")
        return path

    @field_validator("node_selector", "extra_resources")
    @classmethod
    def _are_names(cls, entries: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Refuse what Kubernetes would: labels, and resources, whose names have a prefix."""
        for name, value in entries.items():
            prefix, slash, rest = name.rpartition("/")
            if not LABEL.fullmatch(rest) or (slash and not PREFIX.fullmatch(prefix)):
                raise ValueError(
                    f"'{name}' is no name in Kubernetes: letters, digits, '-', '_' and '.', such as a.org/b"
                )
            if info.field_name == "extra_resources" and not slash and not name.startswith("hugepages-"):
                raise ValueError(f"'{name}' is no resource of a device: its name has a prefix, such as rdma/ib")
            if value and isinstance(value, str) and not LABEL.fullmatch(value):
                raise ValueError(f"'{value}' is no value of the label {name}: letters, digits, '-', '_' and '.' only")
        return entries

    @model_validator(mode="after")
    def _has_a_router(self) -> Self:
        if self.kv_routing and self.operator != "dynamo":
            raise ValueError("has kv_routing=true, which is of Dynamo's router alone: add manifests.operator=dynamo")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        fetches, storage = self.fetch.words is not None, self.storage
        faults = []
        if self.most < self.replicas:
            faults.append(f"max_replicas '{self.max_replicas}' is less than replicas={self.replicas}")
        if self.ttft_ms is not None and self.most == self.replicas:
            faults.append(f"ttft_ms '{self.ttft_ms}' scales nothing where max_replicas is replicas={self.replicas}")
        if storage == "host_path" and self.host_path is None:
            faults.append("storage 'host_path' needs manifests.host_path=/folder/on/the/nodes")
        if storage != "host_path" and self.host_path is not None:
            faults.append(f"host_path '{self.host_path}' goes only with manifests.storage=host_path, not '{storage}'")
        if storage == "empty_dir" and not fetches:
            faults.append("storage 'empty_dir' needs manifests.fetch.hub=org/name or manifests.fetch.command=[...]")
        if storage != "empty_dir" and fetches:
            faults.append(f"fetch goes only with manifests.storage=empty_dir, not '{storage}'")
        for key, value in {
            "hf_token_secret": self.hf_token_secret, "fetch.secret": self.fetch.secret, "fetch.image": self.fetch.image
        }.items():  # fmt: skip
            if value is not None and not fetches:
                what = "is read by manifests.fetch.hub and manifests.fetch.command alone, which are not given; a server"
                faults.append(f"{key} '{value}' {what} on a finished repository fetches nothing")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class MigrateSettings(Group):
    """Input and output of `make migrate`.

    Attributes:
        path: what was served with TensorRT-LLM 1.2: an engine folder, a Triton repository, or a script that builds the
            engine; null is the deployment of these settings.
        command: the trtllm-build command that built the engine, on one line; also beside `path`.
        folder: where the output goes; one folder per deployment below it.
    """

    path: Path | None = None
    command: str | None = None
    folder: Path = Path("migrated")
