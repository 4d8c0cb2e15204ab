"""Write the table of metrics in docs/benchmarking.md: `python -m scripts.metrics_docs`; a test checks it."""

import re
import sys

from pipelines.domain.metrics import METRICS
from pipelines.settings.paths import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "benchmarking.md"
BEGIN = "<!-- metrics: made by python -m scripts.metrics_docs from pipelines/domain/metrics.py -->"
END = "<!-- end of metrics -->"


def table() -> str:
    """Format the metrics as a Markdown table with one row per metric."""
    rows = [("metric", "in results", "definition", "unit", "better", "source"), ("---",) * 6]
    for metric in METRICS:
        unit = metric.unit.stored
        rows.append((metric.title, f"`{metric.name}`", metric.definition, unit, metric.better or "", metric.source))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(text: str) -> str:
    """Return the page with the table between its marker lines replaced.

    Raises:
        ValueError: the page does not contain the marker lines.
    """
    marks = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not marks.search(text):
        raise ValueError(f"{PAGE} does not contain the lines '{BEGIN}' and '{END}'")
    return marks.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
