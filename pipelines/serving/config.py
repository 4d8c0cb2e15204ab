"""Settings of a server that this project starts itself."""

import ipaddress
from itertools import count
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.settings.base import HOST, PORT, Group, Positive, typed

Port = Annotated[int, Field(ge=1, le=65535)]
API_KEY = "TRTLLM_API_KEY"
"""Environment variable with the key of the OpenAI-compatible service."""
USUAL_PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "openai_port": 9000}


class ServingSettings(Group):
    """How the server is started.

    A server that is only measured or asked always uses free ports, so that it never conflicts with a running one.

    Attributes:
        server: tritonserver, or trtllm_serve: TensorRT-LLM's own server, for engine=tensorrt_llm_llmapi.
        repository: an existing Triton model repository, e.g. copied from another machine; then nothing is built.
        host: IPv4 address to listen on: 127.0.0.1 is this machine only, 0.0.0.0 every network.
        expose_triton: whether tritonserver's own ports are opened too where `host` is not this machine only; one
            request to them can end the server.
        http_port: null is 8000 in `make serve` when free, else any free port.
        grpc_port: null is 8001 in `make serve` when free, else any free port.
        metrics_port: null is 8002 in `make serve` when free, else any free port.
        openai: OpenAI-compatible access in front of the same server; beyond this machine it is always there, as the
            only way in.
        openai_port: null is 9000 in `make serve` when free, else any free port.
        api_key: whether clients of the OpenAI-compatible service must send the key that the variable TRTLLM_API_KEY
            holds here; health and metrics answer without it.
        cors_origins: web pages of these origins may use the OpenAI-compatible service from a browser.
        image_hosts: servers, as host or host:port, that pictures of chats may be fetched from.
        chat_template: Jinja file for a tokenizer without a chat template; null is the tokenizer's own.
        max_body_bytes: the longest body of a request to the OpenAI-compatible service.
        max_prompts: most answers that one request may ask for: prompts times n.
        request_timeout_s: seconds after which a request is given up, from its arrival to its last token.
        tritonserver: path of the program; null is /opt/tritonserver, PATH, or the one inside nvidia-pytriton.
        multi_gpu: leader starts a process per GPU under mpirun; orchestrator starts one that spawns the ranks.
        startup_timeout_s: seconds until every model must be ready.
        drain_timeout_s: seconds that running requests may take to finish after Ctrl-C.
        restarts: how often in a row `make serve` starts a server again that ended by itself; 0 is never.
        log_verbose: level of tritonserver's verbose log; 0 is off.
        show_log: whether to print tritonserver's log as it is written, for systems that collect standard output.
    """

    LATER: ClassVar[tuple[str, ...]] = ("server", "api_key", "image_hosts")
    OF_THE_FRONT: ClassVar[tuple[str, ...]] = (
        "api_key", "cors_origins", "image_hosts", "chat_template", "max_body_bytes", "max_prompts", "request_timeout_s",
    )  # fmt: skip
    """Settings that only the OpenAI-compatible service reads."""
    OF_TRITON: ClassVar[tuple[str, ...]] = (
        "expose_triton", "http_port", "grpc_port", "metrics_port", "openai", "multi_gpu", "log_verbose",
    )  # fmt: skip

    server: Literal["tritonserver", "trtllm_serve"] = "tritonserver"
    repository: Path | None = None
    host: str = "127.0.0.1"
    expose_triton: bool = False
    http_port: Port | None = None
    grpc_port: Port | None = None
    metrics_port: Port | None = None
    openai: bool = False
    openai_port: Port | None = None
    api_key: bool = False
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    image_hosts: tuple[Annotated[str, Field(pattern=rf"^{HOST}({PORT})?$")], ...] = ()
    chat_template: Path | None = None
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**30)] = 4_000_000
    max_prompts: Annotated[int, Field(ge=1, le=2**20)] = 128
    request_timeout_s: Positive = 600
    tritonserver: Path | None = None
    multi_gpu: Literal["leader", "orchestrator"] = "leader"
    startup_timeout_s: Positive = 600
    drain_timeout_s: Positive = 30
    restarts: Annotated[int, Field(ge=0)] = 5
    log_verbose: Annotated[int, Field(ge=0)] = 0
    show_log: bool = False

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        """Require an IPv4 address: the HTTP service binds addresses, not names, and spells IPv6 in three ways."""
        try:
            ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise ValueError(
                f"'{host}' is not an IPv4 address: take 127.0.0.1 (this machine only), 0.0.0.0 (every network) "
                "or the address of one network card"
            ) from None
        return "127.0.0.1" if host == "localhost" else host

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        ports = {name: port for name in USUAL_PORTS if (port := getattr(self, name)) is not None}
        for name, port in ports.items():
            if other := next((each for each in ports if ports[each] == port and each != name), None):
                raise ValueError(
                    f"has serving.{name}={port} and serving.{other}={port}: give every service its own port"
                )
        return self

    @model_validator(mode="after")
    def _key_guards_the_only_way_in(self) -> Self:
        """Refuse a key where clients can go past the service that asks for it."""
        if self.api_key and self.server != "tritonserver":
            raise ValueError(f"has api_key=true, which server={self.server} does not ask for: leave it out")
        if self.api_key and not self.loopback and self.expose_triton:
            raise ValueError("has api_key=true and expose_triton=true, which opens ports that ask for no key")
        return self

    @property
    def ports(self) -> dict[str, int]:
        """Where nobody looks for free ports: each service's given port, else the next one from the usual one up."""
        ports = {name: port for name in USUAL_PORTS if (port := getattr(self, name)) is not None}
        for name, usual in USUAL_PORTS.items():
            if name not in ports:
                ports[name] = next(port for port in count(usual) if port not in ports.values())
        return {name: ports[name] for name in USUAL_PORTS}

    @field_validator("chat_template")
    @classmethod
    def _is_there(cls, template: Path | None) -> Path | None:
        if template is not None and not template.is_file():
            raise ValueError(f"'{template}' is not a file: give a Jinja chat template, or null for the tokenizer's own")
        return template.absolute() if template else None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.IPv4Address(self.host).is_loopback

    @property
    def front(self) -> bool:
        """Whether our own service runs in front of tritonserver: for OpenAI's clients, or as the only way in."""
        return self.openai or not (self.loopback or self.expose_triton)

    @property
    def triton_host(self) -> str:
        """The address that tritonserver itself listens on."""
        return self.host if self.loopback or self.expose_triton else "127.0.0.1"

    @property
    def listens_on(self) -> dict[str, str]:
        """Setting of a port -> the address of the service that listens on it."""
        front = {"openai_port": self.host}
        if self.server == "trtllm_serve":
            return front
        own = ("http_port", "grpc_port", "metrics_port")
        return dict.fromkeys(own, self.triton_host) | (front if self.front else {})

    @property
    def unused(self) -> str:
        """What to say of settings that are given for a service that does not run; empty if there are none."""
        triton = self.server == "tritonserver"
        keys = [*(() if "openai_port" in self.listens_on else ("openai_port",))]
        keys += [*(() if self.front and triton else self.OF_THE_FRONT), *(() if triton else self.OF_TRITON)]
        if not (values := self.changed(keys)):
            return ""
        shown = (
            f"serving.{key}={','.join(value) if isinstance(value, tuple) else typed(value)}"
            for key, value in values.items()
        )
        why = "its service runs with serving.openai=true" if triton else "this server has no such setting"
        return f"{', '.join(shown)} {'is' if len(values) == 1 else 'are'} not used: {why}."

    @property
    def on_free_ports(self) -> Self:
        """The same on any free ports of this machine alone, for a server that only this program asks."""
        return self.model_copy(update={"host": "127.0.0.1", **dict.fromkeys(USUAL_PORTS)})

    @property
    def local_host(self) -> str:
        """The address under which this machine itself reaches tritonserver."""
        return "127.0.0.1" if self.triton_host == "0.0.0.0" else self.triton_host

    @property
    def front_host(self) -> str:
        """The address under which this machine itself reaches the service in front."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host
