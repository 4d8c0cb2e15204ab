"""Settings of a server that this project starts itself."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipelines.settings.base import Group, Positive

Port = Annotated[int, Field(ge=1, le=65535)]
USUAL_PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "openai_port": 9000}


class ServingSettings(Group):
    """How tritonserver is started.

    A port that is None is the usual one (8000, 8001, 8002, OpenAI 9000) when `make serve` finds it free, and any
    free one otherwise; a benchmark always takes any free one, so that it never stands in the way of a server.

    `repository` is a Triton model repository that is already there, e.g. copied from another machine; `make serve` then
    builds nothing. `show_log` prints the server's log as it comes, where standard output is what is collected.
    """

    repository: Path | None = None
    host: str = "127.0.0.1"
    http_port: Port | None = None
    grpc_port: Port | None = None
    metrics_port: Port | None = None
    openai: bool = False
    openai_port: Port | None = None
    openai_target: Literal["ensemble", "tensorrt_llm_bls"] = "ensemble"
    chat_template: Path | None = None
    tritonserver: Path | None = None
    multi_gpu: Literal["leader", "orchestrator"] = "leader"
    startup_timeout_s: Positive = 600
    drain_timeout_s: Positive = 30
    log_verbose: Annotated[int, Field(ge=0)] = 0
    show_log: bool = False

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, host: str) -> str:
        """The HTTP service binds addresses, not names; IPv6 it spells in three ways, so it is left out."""
        try:
            ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
        except ValueError:
            raise ValueError(
                f"'{host}' is not an IPv4 address: take 127.0.0.1 (this machine only), 0.0.0.0 (every network) "
                "or the address of one network card"
            ) from None
        return "127.0.0.1" if host == "localhost" else host

    @field_validator("chat_template")
    @classmethod
    def _is_there(cls, template: Path | None) -> Path | None:
        if template is not None and not template.expanduser().is_file():
            raise ValueError(f"'{template}' is not a file: give a Jinja chat template, or null for the tokenizer's own")
        return template.expanduser().absolute() if template else None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.IPv4Address(self.host).is_loopback

    @property
    def local_host(self) -> str:
        """The address under which this machine itself reaches the server."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host
