"""Links in the Markdown files lead to something that exists: `python -m tests.docs_links`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def broken_links(root: Path) -> list[str]:
    """Every relative link of a tracked Markdown file whose target is missing, as "file: target"."""
    found = []
    files = [
        *root.glob("*.md"),
        *root.glob("docs/**/*.md"),
        *root.glob("eval/**/*.md"),
        *root.glob("pipelines/**/*.md"),
    ]
    for path in files:
        for target in LINK.findall(path.read_text()):
            name, _, anchor = target.partition("#")
            if name.startswith(("http://", "https://", "mailto:")):
                continue
            goal = (path.parent / name) if name else path
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                found.append(f"{path.relative_to(root)}: {target}")
    return found


def anchors(path: Path) -> set[str]:
    """Anchors of a Markdown file's headings, as the usual hosts make them."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    BROKEN = broken_links(ROOT)
    sys.stdout.write("\n".join(BROKEN) + "\n" if BROKEN else "docs: all links lead somewhere\n")
    sys.exit(1 if BROKEN else 0)
