"""After a bad night: a file for an issue, and a webhook."""

import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipelines.cli.main import main
from pipelines.nightly.nightly_command import WEBHOOK, report_bad_night
from tests.support.nights import nightly_settings

OUTCOME = ["REGRESSION  tiny_gemma fp8 got slower", "- output tokens/s 1,000 -> 800", "FAILED  tiny_llama: killed"]


@pytest.fixture
def webhook(monkeypatch):
    """A server that keeps what it is sent; `status` is its answer."""

    class Handler(BaseHTTPRequestHandler):
        got, status = [], 200

        def do_POST(self):
            Handler.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(Handler.status)
            if Handler.status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:{server.server_port}/services/s3cret")
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_bad_night_writes_the_issue_and_calls_the_webhook_and_a_good_one_clears_it(tmp_path, webhook):
    settings = nightly_settings(issue=tmp_path / "issue.md")
    report_bad_night(settings, "20261128T000000Z", OUTCOME)
    text = settings.issue.read_text()
    assert text.startswith(f"# nightly {settings.name}: 20261128T000000Z\n"), "its id has the host that measured"
    assert "REGRESSION tiny_gemma fp8 got slower\n\n- output tokens/s 1,000 -> 800\n" in text
    (sent,) = webhook.got
    assert "FAILED tiny_llama: killed" in sent["text"]
    report_bad_night(settings, "20261129T000000Z", [])
    assert not settings.issue.exists()
    assert len(webhook.got) == 1, "nobody is told of a good night"


def test_an_issue_that_cannot_be_written_is_refused_before_the_night(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    (tmp_path / "file").write_text("")
    words = [f"nightly.history={tmp_path / 'history'}", f"report.folder={tmp_path / 'reports'}"]
    assert main(["nightly", *words, f"nightly.issue={tmp_path / 'file' / 'issue.md'}"]) == 2
    assert f"nightly.issue='{tmp_path / 'file'}'" in capsys.readouterr().err
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (500, "status 500"),
        (302, "status 302"),
        ("http://127.0.0.1:9/services/s3cret", "Connection refused"),
        ("http://name.invalid/s3cret", "[A-Z]"),
        ("http://127.0.0.1:9/two words/s3cret", "InvalidURL"),
        ("s3cret", "its address does not begin with http:// or https://"),
        ("file:///s3cret", "its address does not begin with http:// or https://"),
    ],
)
def test_a_webhook_that_fails_is_a_warning_without_its_address(address, reason, webhook, monkeypatch, capsys):
    if isinstance(address, int):
        webhook.status = address
    else:
        monkeypatch.setenv(WEBHOOK, address)
    report_bad_night(nightly_settings(), "run", OUTCOME)
    said = capsys.readouterr()
    assert re.search(f"did not take the outcome: {reason}", " ".join((said.out + said.err).split()))
    assert "s3cret" not in said.out + said.err


def test_a_night_does_not_wait_for_a_webhook_that_never_finishes(monkeypatch, capsys):
    """Its server sends a byte of its answer now and then, so that no single read lasts."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nServer: ")
                while not ended.wait(0.05):
                    connection.sendall(b"x")

        server = threading.Thread(target=answer, daemon=True)
        server.start()
        monkeypatch.setenv(WEBHOOK, f"http://127.0.0.1:{listener.getsockname()[1]}/s3cret")
        monkeypatch.setattr("pipelines.nightly.nightly_command.WEBHOOK_S", 0.4)
        night = threading.Thread(target=report_bad_night, args=(nightly_settings(), "run", OUTCOME), daemon=True)
        night.start()
        night.join(10)
        assert not night.is_alive()
        ended.set()
        server.join()
    said = capsys.readouterr()
    assert "did not take the outcome: no answer within 0.4 s" in " ".join((said.out + said.err).split())
