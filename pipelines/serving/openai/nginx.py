"""nginx in front of the OpenAI service where other machines reach it: its configuration, and its process.

The service then listens on a socket file alone. nginx takes connections, heads and slow clients off its event loop;
bodies are passed on as they come, because the service bounds what all of them hold together.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from pipelines.serving.openai.bodies import BODY_TIMEOUT_S, Limits

HEAD_TIMEOUT_S, IDLE_TIMEOUT_S = 20, 75
MAX_HEAD_BYTES = 32_768
MOST_CONNECTIONS, MOST_OF_ONE_CLIENT = 4096, 2048  # a proxy of many clients has one address
POLL_S, LAST_BYTES_S = 0.02, 1.0
CONFIGURATION = """\
daemon off;
worker_processes 1;  # what it does is little
worker_rlimit_nofile {files};
worker_shutdown_timeout {drain_s}s;
pid {folder}/nginx.pid;
error_log stderr emerg;  # one line per broken request would let anyone fill the disk
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  server_tokens off;
  default_type application/json;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  limit_conn_zone $binary_remote_addr zone=clients:10m;
  limit_conn_status 429;
  upstream service {{
    server unix:{folder}/service.sock max_fails=0;
    keepalive 64;
    keepalive_timeout 4s;  # the service closes idle connections after 5 s
  }}
  server {{
    listen {host}:{port};
    client_header_timeout {head_timeout_s}s;
    client_body_timeout {body_timeout_s}s;
    send_timeout {idle_timeout_s}s;
    keepalive_timeout {idle_timeout_s}s;
    lingering_timeout 2s;
    large_client_header_buffers 4 {header_buffer};
    client_max_body_size {body_bytes};
    limit_conn clients {most_of_one_client};
    location / {{
      proxy_pass http://service;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_request_buffering off;
      proxy_buffering off;  # events of a stream leave as they come
      proxy_read_timeout {read_timeout_s}s;
      proxy_next_upstream off;
    }}
{refusals}
  }}
}}
"""


def find() -> str | None:
    """Return the path of nginx, or None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def configuration(host: str, port: int, folder: Path, limits: Limits, drain_s: int) -> str:
    """Return the configuration of an nginx that listens on an address and asks the service in a folder."""
    return CONFIGURATION.format(
        host=host,
        port=port,
        folder=folder,
        files=4 * MOST_CONNECTIONS,
        connections=2 * MOST_CONNECTIONS,  # each to a client may have one to the service
        drain_s=max(drain_s, 1),
        head_timeout_s=HEAD_TIMEOUT_S,
        body_timeout_s=round(BODY_TIMEOUT_S),
        idle_timeout_s=IDLE_TIMEOUT_S,
        header_buffer=MAX_HEAD_BYTES // 4,
        body_bytes=limits.body_bytes,
        most_of_one_client=MOST_OF_ONE_CLIENT,
        read_timeout_s=round(limits.request_timeout_s) + 10,
        refusals="\n".join(_refusals(limits.body_bytes)),
    )


def _refusals(body_bytes: int) -> list[str]:
    """Return the rules that put what nginx refuses into the form of OpenAI's errors."""
    invalid, limited, failed = "invalid_request_error", "rate_limit_error", "server_error"
    long_head = f"The head of a request has at most {MAX_HEAD_BYTES} bytes, {MAX_HEAD_BYTES // 4} in a line."
    rows = [
        ("400", 400, invalid, None, "This is not a valid HTTP request."),
        ("414 494", 400, invalid, None, long_head),
        ("413", 413, invalid, "body_too_large", f"A body has at most {body_bytes:,} bytes (serving.max_body_bytes)."),
        ("429", 429, limited, "rate_limit_exceeded", f"One client may have {MOST_OF_ONE_CLIENT} requests at a time."),
        ("500 502 503 504", 503, failed, "unavailable", "The service does not respond. Send the request again."),
    ]  # fmt: skip
    lines = []
    for number, (caught, status, kind, code, message) in enumerate(rows):
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
        lines += [
            f"    error_page {caught} ={status} /refused/{number};",
            f"    location = /refused/{number} {{ internal; return {status} '{body}'; }}",
        ]
    return lines


class Nginx:
    """A running nginx.

    Attributes:
        upstream: the socket file on which the service must listen.
    """

    def __init__(self, program: str, host: str, port: int, limits: Limits, drain_s: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trtllm-nginx-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        folder.chmod(0o711)  # started by root, its worker is another user
        self.upstream = folder / "service.sock"
        self._pid_file = folder / "nginx.pid"
        self._command = [program, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
        (folder / "nginx.conf").write_text(configuration(host, port, folder, limits, drain_s))
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False  # to end

    def start(self) -> None:
        """Start it once the service listens, and wait until it does too.

        Raises:
            SystemExit: it ended instead; its own words are on standard error.
        """
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        while not self._pid_file.exists():  # it is written when all addresses are bound
            if self.died:
                self.close()
                raise SystemExit("nginx did not start.")
            time.sleep(POLL_S)

    @property
    def died(self) -> bool:
        """Whether it exited without being told to."""
        return not self._asked and self._process is not None and self._process.poll() is not None

    def drain(self) -> None:
        """Let it take no new connection, and finish its requests."""
        if self._process is not None and not self.died:
            self._asked = True
            self._process.send_signal(signal.SIGQUIT)

    def close(self) -> None:
        """End it as soon as its clients have their last bytes."""
        if self._process is not None:
            try:
                self._process.wait(LAST_BYTES_S)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
        self._folder.cleanup()
