"""The written report: same bytes twice, everything escaped, nothing fetched, absent parts named."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from pipelines.document.blocks import BulletList, Callout, Document, Text, escape, render_markdown
from pipelines.document.canvas import DARK, LIGHT, render_html
from pipelines.domain.errors import UserError
from pipelines.report.collect import collect
from pipelines.report.report_command import write_report
from pipelines.store.store import Store
from tests.support.report_store import VARIANTS, WRONG, add_benchmark, add_format, full_store

NASTY = "<script>alert(1)</script>&\"'|$x_1$`*"


class Page(HTMLParser):
    """Tags, ids, addresses and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.header_cells_without_scope = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags[tag] += 1
        self.ids.update([found["id"]] if "id" in found else [])
        self.addresses += [found[name] for name in ("href", "src", "xlink:href") if name in found]
        self.header_cells_without_scope += tag == "th" and "scope" not in found


@pytest.fixture(scope="module")
def written(two_formats, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return write_report(collect(two_formats), folder)


@pytest.mark.pictures
def test_a_second_time_gives_the_same_bytes(two_formats, written, tmp_path):
    again = write_report(collect(two_formats), tmp_path)
    for first in written.html.parent.iterdir():
        assert first.read_bytes() == (again.html.parent / first.name).read_bytes(), first.name


def test_nothing_is_fetched_and_only_the_pages_own_script_runs(written):
    """The other script element is data. The policy names the script by its digest, so no other can run."""
    text = written.html.read_text()
    page = Page(text)
    assert page.tags["link"] == page.tags["img"] == page.tags["iframe"] == 0
    files = {path.name for path in written.files}
    assert {address for address in page.addresses if not address.startswith("#")} == files
    assert re.findall(r"<script([^>]*)>", text) == [' type="application/json"', ""]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in text
    assert "@import" not in written.html.read_text()


def test_ids_are_unique_and_links_lead_somewhere(written):
    page = Page(written.html.read_text())
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert [address for address in page.addresses if address[0] == "#" and address[1:] not in page.ids] == []


def test_tables_and_plots_say_what_they_are(written):
    text = written.html.read_text()
    page = Page(text)
    assert page.header_cells_without_scope == 0
    assert len(re.findall(r'role="(?:img|group)" aria-label=', text)) == page.tags["svg"] > 5
    captions = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", text, re.S)
    assert all(re.search(r'class="tag">(measured|recorded)<', caption) for caption in captions)


def test_numbers_under_load_carry_the_six(written):
    text = written.html.read_text()
    six = "model synthetic; precision fp8; ISL 128; OSL 8; concurrency 1, 4, 16; TP 1"
    assert text.count(six) >= 4  # levels, distributions, percentiles, counters


def test_labels_of_users_are_escaped_everywhere(tmp_path):
    """Names come from folders and overrides; none may become markup, Markdown or mathematics."""
    store = Store(tmp_path / "store")
    add_benchmark(store, add_format(store, "none", model="m"), "none", name=NASTY, model="m")
    paths = write_report(collect(store), tmp_path / "out")
    html, markdown = paths.html.read_text(), paths.markdown.read_text()
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html
    (steps,) = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert NASTY in json.loads(steps)["steps"][0][0]["caption"]
    assert "<script" not in markdown


@pytest.mark.pictures
def test_strange_format_names_draw(tmp_path, monkeypatch):
    variants = ("a$b$c", "<b>&", "ä")
    for variant in variants:
        monkeypatch.setitem(VARIANTS, variant, 1.0)
        monkeypatch.setitem(WRONG, variant, 0)
    store = full_store(tmp_path / "store", ("none", *variants))
    paths = write_report(collect(store), tmp_path / "out")
    for path in paths.plots:
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_text())  # well-formed
    drawn = "".join(ElementTree.parse(tmp_path / "out" / "throughput_latency.svg").getroot().itertext())
    assert [variant for variant in variants if variant not in drawn] == []


def test_colours_are_the_themes(written):
    """No colour of the drawing is left that one of the themes cannot change."""
    html = written.html.read_text()
    drawings = re.findall(r"<svg.*?</svg>", html, re.S)
    left = {colour for each in drawings for colour in re.findall(r"#[0-9a-f]{6}\b", each)}
    assert left <= {"#000000", "#ffffff"}
    assert set(LIGHT) == set(DARK)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_and_lines_can_be_seen(theme):
    """WCAG: 4.5:1 for text, 3:1 for what is drawn."""
    for role, colour in theme.items():
        if role not in ("paper", "grid"):
            assert contrast(colour, theme["paper"]) >= (4.5 if role in ("ink", "muted") else 3), role


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_was_not_measured_is_named_absent(tmp_path):
    store = Store(tmp_path / "store")
    add_format(store, "none")
    paths = write_report(collect(store), tmp_path / "out")
    assert "Missing: synthetic none was not benchmarked yet." in paths.html.read_text()
    assert "not measured" in paths.markdown.read_text()
    assert not (tmp_path / "out" / "throughput_latency.svg").exists()


def test_a_cut_benchmark_is_a_warning(tmp_path):
    store = full_store(tmp_path / "store", ("none",), cut=16, bottleneck=4)
    text = write_report(collect(store), tmp_path / "out").markdown.read_text()
    assert "> Warning: The benchmark of synthetic none is incomplete: the server died." in text
    assert "concurrency 16: cut short (the server died)" in text
    assert "concurrency 4: client-limited (cpu 98 %), so its throughput is a lower bound" in text
    assert "Hollow: the load generator was the bottleneck." in text


def test_a_benchmark_without_a_single_level_is_reported(tmp_path):
    """Interrupted before the first level was over: nothing to draw, and that is said."""
    store = full_store(tmp_path / "store", ("none",), concurrencies=(), cut=1)
    text = write_report(collect(store), tmp_path / "out").markdown.read_text()
    assert "is incomplete: the server died" in text
    assert "no request of its benchmark finished (the server died)" in text
    assert not (tmp_path / "out" / "throughput_latency.svg").exists()


def test_the_markdown_shows_every_plot(written):
    text = written.markdown.read_text()
    shown = set(re.findall(r"\]\(([^)]+\.svg)\)", text))
    assert shown == {path.name for path in written.plots if path.suffix == ".svg"}


def test_markdown_text_stays_text():
    assert escape("a|b *c* <i> _d_\nint4_wo") == r"a\|b \*c\* &lt;i&gt; \_d\_ int4_wo"


def test_a_folder_that_cannot_be_written_is_said(two_formats, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .*/file/report.*report\.folder="):
        write_report(collect(two_formats), tmp_path / "file" / "report")


def test_plots_of_formats_that_are_gone_go_with_them(tmp_path):
    """A report of fewer formats into the same folder; files that no report made stay."""
    store = full_store(tmp_path / "store")
    folder = tmp_path / "report"
    write_report(collect(store), folder)
    before = {path.name for path in folder.iterdir()}
    (folder / "own.svg").write_text("<svg/>")
    paths = write_report(collect(store, variants=[next(iter(VARIANTS))]), folder)
    after = {path.name for path in folder.iterdir()}
    assert after == {"report.md", "report.html", "own.svg", *(path.name for path in (*paths.plots, *paths.files))}
    assert after < before | {"own.svg"}


def test_commands_in_sentences_are_code():
    """Only their backticks are marks; one alone, and those of labels and cells, stay what they are."""
    blocks = (Text("See `make evaluate quant=a_b`, <b>`</b>."), Callout("note", "``a`` `x|y`"), BulletList(("`*`",)))
    made = Document("`t`", "", (), blocks, ())
    assert render_markdown(made).splitlines()[4::2] == [
        r"See `make evaluate quant=a_b`, &lt;b&gt;\`&lt;/b&gt;.", r"> Note: \`\`a\`\` `x|y`", "- `*`"
    ]  # fmt: skip
    page = render_html(made)
    assert "<p>See <code>make evaluate quant=a_b</code>, &lt;b&gt;`&lt;/b&gt;.</p>" in page
    assert '<p class="callout note">``a`` <code>x|y</code></p>' in page
    assert "<h1>`t`</h1>" in page
