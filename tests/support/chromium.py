"""A real browser for tests of pages, found as `chromium`, `chromium-browser` or `google-chrome`."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed (chromium, google-chrome)")
"""Skips a test without a browser; `make test-all` installs one if it has the rights (scripts/test_packages.sh)."""
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr",
]  # fmt: skip
DARK_THEME, LIGHT_THEME = "--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1"
FRAME = """<!doctype html><title>frame</title><iframe src="copy.html" width="{width}" height="800"
style="border:0"></iframe><pre id="said"></pre>
<script>
addEventListener("message", event => said.textContent = btoa(unescape(encodeURIComponent(event.data))));
</script>"""


def browse(target: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page; the page's console output goes to standard error."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, target.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def allowed(page: str, script: str) -> str:
    """Let one more script run in a page that allows only its own, by its digest."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("script-src 'sha256-", f"script-src 'sha256-{digest}' 'sha256-", 1)


def said_by(page: str, folder: Path, script: str, *flags: str, width: int = 1000) -> Any:
    """Run a script at the end of a page and return the value that it passes to `answer(value)`.

    The page is opened in a frame, which can have widths that windows cannot.

    Args:
        page: the page's text.
        folder: where the copy to open is written.
        script: JavaScript that runs after the page's own; may await.
        flags: flags of Chromium.
        width: width of the frame in CSS pixels.
    """
    call = f"""
const answer = value => parent.postMessage(JSON.stringify(value), "*");
addEventListener("load", async () => {{ try {{ {script} }} catch (error) {{ answer("failed: " + error.stack); }} }});
"""
    page = allowed(page, call).replace("</body>", f"<script>{call}</script></body>", 1)
    (folder / "copy.html").write_text(page, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width))
    done = browse(folder / "frame.html", folder / "profile", *flags, "--virtual-time-budget=20000", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    said = re.search(r'<pre id="said">([^<]+)</pre>', done.stdout)
    assert said, done.stderr[-2000:]
    value = json.loads(base64.b64decode(said[1]))
    assert not str(value).startswith("failed: "), value
    return value
