"""Questions about pictures in a report: the picture, and the answers in 16 bit and of a format."""

from dataclasses import replace

from eval.dataset import picture_questions
from eval.results import QuestionRecord
from pipelines.document.blocks import Document, Section
from pipelines.document.canvas import render_html
from pipelines.report.collect import collect
from pipelines.report.data import ReportData
from pipelines.report.plots_pictures import SHOWN, SHOWN_ON_SCREEN, picture_figure, picture_lines, shown_questions
from pipelines.store.store import Store

ROWS = picture_questions()


def records(wrong: int) -> tuple[QuestionRecord, ...]:
    """Return right answers to ten questions of each kind, but for the last `wrong` ones about colours."""
    made = []
    for kind, rows in ROWS.items():
        for index, row in enumerate(rows[:10]):
            right = kind != "colour" or index < 10 - wrong
            choice = row["answer"] if right else (row["answer"] + 1) % 4
            made.append(QuestionRecord(kind, index, (-1.0,) * 4, choice, row["answer"], right))
    return tuple(made)


def seen(store: Store) -> ReportData:
    data = collect(store, "synthetic", None)
    before = replace(data.formats[0].accuracy.result, task="mini_pictures", records=records(0))
    plain = replace(data.formats[0], accuracy=replace(data.formats[0].accuracy, result=before))
    after = replace(data.formats[1].accuracy.result, task="mini_pictures", records=records(1))
    accuracy = replace(data.formats[1].accuracy, result=after, before=before)
    return replace(data, formats=(plain, replace(data.formats[1], accuracy=accuracy)))


def test_a_changed_answer_comes_first_then_one_of_each_kind(two_formats: Store) -> None:
    first, *others = shown = shown_questions(seen(two_formats), "synthetic")
    row = ROWS["colour"][9]
    assert first.row == row
    assert first.changed
    assert len(shown) == SHOWN
    assert first.answers == (
        ("16 bit", row["choices"][row["answer"]], True), ("fp8", row["choices"][(row["answer"] + 1) % 4], False),
    )  # fmt: skip
    assert {each.row["subject"] for each in others[:4]} == set(ROWS)
    assert not any(each.changed for each in others)


def test_the_page_holds_the_pictures_themselves(two_formats: Store) -> None:
    data = seen(two_formats)
    figure = picture_figure(data, "synthetic")
    page = render_html(Document("synthetic", "", (), (), (Section("accuracy", "Accuracy", (figure,)),)))
    assert f"data:image/png;base64,{ROWS['colour'][9]['image'].rstrip('=')}" in page
    assert "img-src data:" in page
    assert "fp8: " in page
    assert "(wrong)" in page
    assert "stay in 16 bit" in page
    line = picture_lines(data)[0]
    assert ROWS["colour"][9]["description"] in line
    assert "16 bit" in line
    assert len(picture_lines(data)) == SHOWN_ON_SCREEN


def test_no_questions_about_pictures_no_figure(two_formats: Store) -> None:
    data = collect(two_formats, "synthetic", None)
    assert picture_figure(data, "synthetic") is None
    assert picture_lines(data) == []
