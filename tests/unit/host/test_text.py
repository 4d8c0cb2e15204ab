"""Paragraphs and tables fit the terminal, from 60 to 120 columns."""

import pytest

from pipelines.host.screen import table, width, wrapped

WIDE = [("load", *(f"column {n}" for n in range(9))), *((f"{n}/s", *["1,234"] * 9) for n in (1, 20))]


def screen(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize(("columns", "fits"), [(40, 59), (60, 59), (80, 79), (100, 99), (120, 119), (300, 119)])
def test_the_width_is_that_of_the_terminal_within_bounds(monkeypatch, columns, fits):
    screen(monkeypatch, columns)
    assert width() == fits
    assert max(map(len, wrapped("word " * 100).splitlines())) <= fits


def test_numbers_stand_on_the_right_and_texts_on_the_left():
    rows = [("stage", "took", "result"), ("build", "1 s", "8 MiB"), ("evaluate", "12 s", "80 %")]
    assert table(rows, text_columns=(2,)) == ["stage     took  result", "build      1 s  8 MiB", "evaluate  12 s  80 %"]


def test_lines_have_an_indent():
    assert table([("a", "1"), ("b", "12")], indent=2) == ["  a   1", "  b  12"]


def test_a_title_that_is_wider_than_its_columns_gets_room():
    assert table([("", "x", "y"), ("a", "1", "2")], groups=("", "points lost", "n")) == [
        "   points lost  n",
        "             x  y",
        "a            1  2",
    ]


def test_neighbours_share_a_title_above_their_columns():
    rows = [("", "TTFT", "ITL", "GPUs"), ("fp8", "100", "10", "8")]
    assert table(rows, groups=("", "ms at P95", "ms at P95", "")) == [
        "     ms at P95",
        "     TTFT  ITL  GPUs",
        "fp8   100   10     8",
    ]


def test_a_text_among_the_rows_is_a_paragraph_of_its_own(monkeypatch):
    screen(monkeypatch, 60)
    lines = table([("what", "GPUs"), ("  int4", "1"), "  fp4: not possible: " + "why " * 20, ("  fp8", "2")])
    assert lines[:2] == ["what    GPUs", "  int4     1"]
    assert lines[2].startswith("  fp4: not possible: why")
    assert lines[3].startswith("    why")
    assert lines[-1] == "  fp8      2"


def test_where_two_blanks_do_not_fit_columns_have_one(monkeypatch):
    rows = [("model", *["12345678"] * 8), ("llama", *["12345678"] * 8)]
    screen(monkeypatch, 100)
    assert table(rows)[0] == "  ".join(rows[0])
    screen(monkeypatch, 80)
    assert table(rows)[0] == " ".join(rows[0])


def test_texts_that_are_too_wide_go_on_in_the_next_line(monkeypatch):
    screen(monkeypatch, 60)
    name, path = "magnitude_2_4-int4_awq-kv_fp8", "/a/folder/that/is/long/enough/to/stand/alone/in/its/line.log"
    lines = table([("format", "asked", "verdict"), (name, "1,000", f"it failed; log: {path}")], text_columns=(2,))
    assert lines[0].split() == ["format", "asked", "verdict"]
    assert "".join(line[:29].split("  ")[0].strip() for line in lines[1:]).startswith("magnitude_2_4-")
    assert path in "\n".join(lines)  # a path can be copied
    assert all(len(line) <= 59 or path in line for line in lines)


@pytest.mark.parametrize("columns", [60, 70, 80, 100, 120])
def test_a_table_that_is_still_too_wide_goes_on_below_with_its_first_column(monkeypatch, columns):
    screen(monkeypatch, columns)
    lines = table(WIDE)
    assert max(map(len, lines)) < columns
    blocks = "\n".join(lines).split("\n\n")
    assert {block.split()[0] for block in blocks} == {"load"}
    assert [cell for block in blocks for cell in block.splitlines()[0].split("column")[1:]]
    assert sum(block.splitlines()[1].count("1,234") for block in blocks) == 9


def test_a_paragraph_stands_in_the_first_block_alone(monkeypatch):
    screen(monkeypatch, 60)
    lines = table([WIDE[0], "a paragraph", *WIDE[1:]])
    assert lines.count("a paragraph") == 1
    assert lines[1] == "a paragraph"


def test_every_block_of_a_table_names_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first column holds numbers, such as loads."""
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("load", *(f"column {n}" for n in range(8))), *((str(load), *["1"] * 8) for load in (8, 32))]
    lines = table(rows, left=0, repeated=1)
    assert max(map(len, lines)) < 60
    heads = [line.split()[0] for line in lines if line]
    assert len(heads) > 3
    assert heads == ["load", "8", "32"] * (len(heads) // 3)
