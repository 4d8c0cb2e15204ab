"""Golden copies of folders of texts: one in full, and of what resembles it what differs, which a person can read."""

from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path


def check_folder(found: Mapping[str, str], folder: Path, *, rewrite: bool) -> None:
    """Compare texts by relative name with the files of a folder."""
    if rewrite:
        for name, text in found.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    assert contents(folder) == found


def contents(folder: Path) -> dict[str, str]:
    """The text of each file by relative name."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def check_difference(found: Mapping[str, str], base: Mapping[str, str], file: Path, *, rewrite: bool) -> None:
    """Compare how texts differ from others of the same names with a file of differences."""
    lines: list[str] = []
    for name in sorted({*found, *base}):
        if found.get(name) == base.get(name):
            lines.append(f"{name}: the same")
        else:
            old, new = (each.get(name, "").splitlines() for each in (base, found))
            lines += [f"{name}:", *[*unified_diff(old, new, n=2, lineterm="")][2:]]
    text = "\n".join(lines) + "\n"
    if rewrite:
        file.write_text(text)
    assert file.read_text() == text
