"""The Markdown of a fixed store, to be read by a person when it changes: `make golden` rewrites it."""

from pathlib import Path

from pipelines.document.blocks import render_markdown
from pipelines.domain.benchmark import Slo
from pipelines.report.collect import collect
from pipelines.report.sections import document
from tests.support.report_store import full_store

GOLDEN = Path(__file__).parent / "report.md"


def test_the_markdown_report_changed_only_with_a_decision(tmp_path, request):
    store = full_store(tmp_path, ("none", "fp8", "int4_wo"), slo=Slo("given", 30.0, 5.0), bottleneck=16)
    found = render_markdown(document(collect(store)))
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(found)
    assert GOLDEN.read_text() == found
