"""Choose ports: the given ones, the usual ones, or any free ones; ask whether a service answers on one."""

import contextlib
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from pipelines.domain.errors import Fault, UserError, refuse
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


def port_faults(settings: ServingSettings) -> list[Fault]:
    """Return why a server cannot listen where the settings say, as of now."""
    if not is_free(settings.host, 0):
        fault = f"serving.host='{settings.host}' is not an address of this machine."
        return [Fault(fault, "127.0.0.1 always works; 0.0.0.0 means all addresses.")]
    root = privileged_ports(settings)
    given = {name: getattr(settings, name) for name in settings.listens_on}
    return root or [
        Fault(
            f"serving.{name}={port} is in use: {_listener(port)} listens on {settings.listens_on[name]}:{port}.",
            todo=f"Stop that program, or take any free port: serving.{name}=null",
        )
        for name, port in given.items()
        if port is not None and not is_free(settings.listens_on[name], port)
    ]


def _listener(port: int) -> str:
    """Return which program listens on a port, as far as this user may see."""
    import psutil  # with the server's packages, and plans import this module

    for each in psutil.net_connections("tcp"):
        if each.pid is not None and each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port:
            with contextlib.suppress(psutil.Error):
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return "a program of another user or container"


def choose_ports(settings: ServingSettings, *, usual: bool = False) -> dict[str, int]:
    """Decide every port.

    Args:
        settings: None leaves a port open.
        usual: prefer the usual port where the choice is open and the port is free.

    Returns:
        setting's name -> port, for each service that listens.

    Raises:
        UserError: see `port_faults`.
    """
    refuse(port_faults(settings))
    hosts = settings.listens_on
    chosen = {name: port for name in hosts if (port := getattr(settings, name)) is not None}
    for name in hosts:
        if name not in chosen:
            chosen[name] = free_port(hosts[name], chosen, USUAL_PORTS[name] if usual else None)
    return {name: chosen[name] for name in hosts}


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
        for name in settings.listens_on
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
