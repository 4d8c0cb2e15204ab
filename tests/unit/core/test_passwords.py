"""Passwords in addresses are refused where a setting holds them, and never shown, logged or stored."""

import logging
import subprocess
import sys

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError, masked
from pipelines.host.screen import complain
from pipelines.settings.compose import load
from pipelines.store.run_folder import run_folder
from tests.conftest import ROOT

SECRET = "hunter2"
FINE = "https://h:80/a@b?page=2, me@host, git@github.com:a/b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://me:{SECRET}@host:80/v1 is down", "http://***@host:80/v1 is down"),
        (f"https://{SECRET}@host", "https://***@host"),
        (f"proxy socks5h://a:{SECRET}@b@c:1 and ftp://u:{SECRET}@d", "proxy socks5h://***@c:1 and ftp://***@d"),
        (f"'https://h/x?a=1&token={SECRET}&b=2'", "'https://h/x?a=1&token=***&b=2'"),
        (f"https://h/x?X-Amz-Signature={SECRET}#y", "https://h/x?X-Amz-Signature=***#y"),
        (f"s3://h/?api_key={SECRET}", "s3://h/?api_key=***"),
        (f"http://me:a?b/{SECRET}@h", "http://***@h"),
        (
            "https://h:80/a@b?page=2, me@host, git@github.com:a/b",
            "https://h:80/a@b?page=2, me@host, git@github.com:a/b",
        ),
    ],
)
def test_only_what_is_secret_is_hidden(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("eval.url", [f"eval.url=http://me:{SECRET}@host:8000/v1"]),
        ("eval.url", [f"eval.url='http://host:8000/v1?token={SECRET}'"]),
        ("eval has url", [f"eval.url=me:{SECRET}@host/v1"]),
        ("eval.url", [f"eval.url=http://me:a/{SECRET}@host/v1"]),
        ("benchmark has url", [f"benchmark.url=me:{SECRET}@host:8001"]),
        ("benchmark.metrics_url", ["benchmark.url=h:1", f"benchmark.metrics_url=http://me:{SECRET}@host/metrics"]),
        ("report.mlflow", [f"report.mlflow=http://me:{SECRET}@host:5000"]),
        ("manifests.env", [f"+manifests.env.http_proxy='http://me:{SECRET}@proxy'"]),
        ("cluster.env", [f"+cluster.env.HTTPS_PROXY='http://me:{SECRET}@proxy'"]),
        ("manifests.fetch.command", [f"manifests.fetch.command=[curl,'https://h/?sig={SECRET}']"]),
    ],
)
def test_no_setting_holds_a_password_and_no_refusal_shows_it(key, words, tmp_path, capsys):
    assert main(["plan", *words, f"paths.store={tmp_path}/s", f"paths.runs={tmp_path}/r"]) == 2
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert key in " ".join(err.split())
    assert "***" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["http://h:99999/v1", "http://h:0", "http://:80", "ftp://h", "http://h/v1?a=b"])
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(UserError, match=r"eval has url='.*'; give http://host:port/v1"):
        load([f"eval.url='{url}'"])


def test_an_address_that_can_be_is_taken():
    for fine in ("http://h", "https://h:65535/a/v1", "grpc://[::1]:8001"):
        assert load([f"eval.url='{fine}'"]).eval.url == fine


@pytest.mark.parametrize("url", ["h:99999", "h:0", ":8001", "h", "a@h:1"])
def test_a_grpc_address_that_cannot_be_is_refused(url):
    with pytest.raises(UserError, match=r"benchmark has url='.*'; give host:port"):
        load([f"benchmark.url='{url}'"])


def test_what_fails_with_an_address_is_shown_and_logged_without_its_password(tmp_path, capsys):
    complain(f"cannot reach http://me:{SECRET}@proxy:3128")
    with run_folder("x", tmp_path, "", []):
        logging.getLogger().error("retrying https://me:%s@mirror", SECRET)
    said = capsys.readouterr()
    logged = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "***@proxy" in said.err
    assert "***@mirror" in logged
    assert SECRET not in said.out + said.err + logged


def test_a_crash_shows_no_password() -> None:
    crash = f"from pipelines.host.screen import outlive_readers as o; o(); raise OSError('http://me:{SECRET}@h')"
    ran = subprocess.run(
        [sys.executable, "-c", crash], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert "OSError: http://***@h" in ran.stderr
