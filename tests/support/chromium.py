"""A real browser for pages: looked for as `chromium`, `chromium-browser` or `google-chrome`."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed (chromium, google-chrome)")
"""`make test` installs one where it may (scripts/test_packages.sh)."""
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
    """Open a page; its console is on standard error."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, target.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def said_by(page: str, folder: Path, script: str, *flags: str, width: int = 1000) -> Any:
    """What a script at the end of a page answers: it calls `answer(value)` in a frame of a width windows cannot have.

    Args:
        page: the page's text.
        folder: for the copy that is opened.
        script: JavaScript after the page's own; may await.
        flags: of Chromium.
        width: of the frame, CSS pixels.
    """
    call = f"""<script>
const answer = value => parent.postMessage(JSON.stringify(value), "*");
addEventListener("load", async () => {{ try {{ {script} }} catch (error) {{ answer("failed: " + error.stack); }} }});
</script></body>"""
    (folder / "copy.html").write_text(page.replace("</body>", call, 1), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width))
    done = browse(folder / "frame.html", folder / "profile", *flags, "--virtual-time-budget=20000", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    said = re.search(r'<pre id="said">([^<]+)</pre>', done.stdout)
    assert said, done.stderr[-2000:]
    value = json.loads(base64.b64decode(said[1]))
    assert not str(value).startswith("failed: "), value
    return value
