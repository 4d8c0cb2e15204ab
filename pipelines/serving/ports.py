"""Choose ports: the given ones, the usual ones, or any free ones; ask whether a service answers on one."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from pipelines.domain.errors import Fault, UserError
from pipelines.serving.config import USUAL_PORTS, ServingSettings

# Below the range that Linux uses for outgoing connections (32768 and up), so that none of those takes one of our
# ports while the models load.
FREE_RANGE = (20000, 32000)
_chance = random.SystemRandom()  # a seeded global generator (lm-eval seeds it) gives all processes the same ports


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def get(host: str, port: int, path: str) -> tuple[int, str] | None:
    """Return status and body of an HTTP GET; None where nothing listens, speaks HTTP, or finishes its answer."""
    import http.client  # takes ssl along, and plans import this module

    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def answers_200(host: str, port: int, path: str) -> bool:
    """Return whether an HTTP service answers GET with status 200."""
    answer = get(host, port, path)
    return answer is not None and answer[0] == 200


def choose_ports(settings: ServingSettings, *, usual: bool = False) -> dict[str, int]:
    """Decide every port.

    Args:
        settings: None leaves a port open.
        usual: prefer the usual port where the choice is open and the port is free.

    Returns:
        setting's name -> port, for http_port, grpc_port, metrics_port and, with a service in front, openai_port.

    Raises:
        UserError: a given port is in use, or the address is not one of this machine.
    """
    hosts = dict.fromkeys(USUAL_PORTS, settings.triton_host) | {"openai_port": settings.host}
    names = [name for name in USUAL_PORTS if name != "openai_port" or settings.front]
    if not is_free(settings.host, 0):
        raise UserError(
            f"serving.host='{settings.host}' is not an address of this machine.",
            allowed="127.0.0.1 always works; 0.0.0.0 means all addresses.",
        )
    chosen: dict[str, int] = {}
    for name in names:
        if (port := getattr(settings, name)) is not None:
            if not is_free(hosts[name], port):
                raise UserError(
                    f"serving.{name}={port} cannot be used: something already listens on {hosts[name]}:{port}, "
                    "or it needs more rights (below 1024).",
                    todo=f"Stop that program, or use any free port: serving.{name}=null",
                )
            chosen[name] = port
    for name in names:
        if name not in chosen:
            chosen[name] = free_port(hosts[name], chosen, USUAL_PORTS[name] if usual else None)
    return {name: chosen[name] for name in names}


def privileged_ports(settings: ServingSettings) -> list[Fault]:
    """List the given ports that only root may open on this machine."""
    try:
        least = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        least = 1024
    if os.geteuid() == 0:
        return []
    return [
        Fault(
            f"serving.{name}={port} needs the rights of root.",
            f"Ports from {least} up do not.",
            "Give one of these, and let a reverse proxy listen on the lower one.",
        )
        for name in USUAL_PORTS
        if (port := getattr(settings, name)) is not None and port < least
    ]


def free_port(host: str, taken: Mapping[str, int], usual: int | None = None) -> int:
    """Return a free port beside those that are taken; the usual one if that is free.

    Raises:
        UserError: none was found.
    """
    candidates = [] if usual is None else [usual]
    candidates += [_chance.randint(*FREE_RANGE) for _ in range(200)]
    for port in candidates:
        if port not in taken.values() and is_free(host, port):
            return port
    raise UserError(f"There is no free port on {host} between {FREE_RANGE[0]} and {FREE_RANGE[1]}.")
