"""The page in a real browser: phone width, both themes, no message on the console, nothing fetched, not blank."""

import base64
import json
import re
from pathlib import Path

import pytest

from pipelines.document.canvas import DARK, LIGHT
from pipelines.report.collect import collect
from pipelines.report.report_command import write_report
from tests.support.chromium import DARK_THEME, FRAME, LIGHT_THEME, allowed, browse, needs_chromium
from tests.support.report_store import full_store

pytestmark = [pytest.mark.thorough, needs_chromium]

MEASURE = """
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(each => each.open = true);
  const root = document.documentElement, style = getComputedStyle(document.body);
  parent.postMessage(JSON.stringify({
    inner: innerWidth, scroll: root.scrollWidth, paper: style.backgroundColor, ink: style.color,
    fetched: performance.getEntriesByType("resource").map(each => each.name),
    tables: document.querySelectorAll("table").length, plots: document.querySelectorAll("svg").length,
    thin: [...document.querySelectorAll(".plot svg")].filter(each => each.getBoundingClientRect().height < 40).length,
  }), "*");
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("chromium")
    return write_report(collect(full_store(root / "store", ("none", "fp8", "int4_wo"))), root / "out").html


def measured(page: Path, folder: Path, width: int, theme: str) -> dict:
    """Open a copy that may run one measuring script, in a frame of a width windows cannot have."""
    text = allowed(page.read_text(), MEASURE).replace("</head>", f"<script>{MEASURE}</script></head>", 1)
    (folder / "copy.html").write_text(text)
    (folder / "frame.html").write_text(FRAME.format(width=width))
    done = browse(folder / "frame.html", folder / "profile", theme, "--virtual-time-budget=5000", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    said = re.search(r'<pre id="said">([^<]+)</pre>', done.stdout)
    assert said, done.stderr[-2000:]
    return json.loads(base64.b64decode(said[1]))


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize(("theme", "colours"), [(LIGHT_THEME, LIGHT), (DARK_THEME, DARK)], ids=["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(page, tmp_path, theme, colours):
    found = measured(page, tmp_path, 360, theme)
    assert found["inner"] == 360
    assert found["scroll"] <= 360
    assert (found["paper"], found["ink"]) == (rgb(colours["paper"]), rgb(colours["ink"]))
    assert found["fetched"] == []
    assert found["tables"] > 10
    assert found["plots"] > 8
    assert found["thin"] == 0


def test_the_page_itself_is_quiet_and_not_blank(page, tmp_path):
    from PIL import Image

    picture = tmp_path / "page.png"
    done = browse(page, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1280,2400")
    assert "CONSOLE" not in done.stderr
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=1 << 20)
    assert colours is not None
    assert len(colours) > 100
    background = max(count for count, _ in colours)
    assert 0.5 < background / (1280 * 2400) < 0.98
