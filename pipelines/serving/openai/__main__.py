"""Run the service: python -m pipelines.serving.openai --repository R --grpc HOST:PORT ..."""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import socket
from pathlib import Path

import uvicorn

from pipelines.serving.logs import FRONT_STARTED
from pipelines.serving.openai.app import make_app
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.connections import Entrance
from pipelines.serving.openai.prepare import served
from pipelines.serving.repository import read_repository

MOST_CONNECTIONS = 4096
FILES = 2 * MOST_CONNECTIONS


def main() -> None:
    """Serve until SIGTERM; running responses finish first."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serving.openai", description=__doc__)
    parser.add_argument("--repository", type=Path, required=True, help="the model repository that tritonserver serves")
    parser.add_argument("--grpc", required=True, help="host:port of tritonserver's gRPC service")
    parser.add_argument("--metrics", required=True, help="URL of tritonserver's metrics")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain-timeout-s", type=int, default=30)
    parser.add_argument("--cors-origin", action="append", default=[], help="a web page's origin; may be repeated")
    parser.add_argument("--chat-template", type=Path, help="instead of the tokenizer's own")
    usual = Limits()
    parser.add_argument("--max-body-bytes", type=int, default=usual.body_bytes)
    parser.add_argument("--max-prompts", type=int, default=usual.prompts)
    parser.add_argument("--request-timeout-s", type=float, default=usual.request_timeout_s)
    given = parser.parse_args()
    _allow_connections()
    limits = Limits(given.max_body_bytes, given.max_prompts, given.request_timeout_s)
    template = [f"--chat-template={given.chat_template}"] if given.chat_template else []
    reading = [f"--repository={given.repository}", f"--max-prompts={limits.prompts}", *template]
    known = served(read_repository(given.repository), given.metrics, given.chat_template)
    app = make_app(known, Backend(given.grpc), limits, reading, given.cors_origin)
    gc.freeze()  # no later collection walks through the modules, while all answers wait for it
    config = uvicorn.Config(
        app,
        host=given.host,
        port=given.port,
        http=Entrance().protocol,  # type: ignore[arg-type]
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        log_level="error",  # one line per broken request would let anyone fill the disk
        timeout_graceful_shutdown=given.drain_timeout_s,
    )
    with contextlib.suppress(KeyboardInterrupt):  # raised again once Ctrl-C has been obeyed
        _AnnouncedServer(config).run()


class _AnnouncedServer(uvicorn.Server):
    """Says in the log that it has its port; it ends instead where it cannot have it."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(FRONT_STARTED, flush=True)  # noqa: T201 - read by frontend.py


def _allow_connections() -> None:
    """Raise the limit of open files, each connection being one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
