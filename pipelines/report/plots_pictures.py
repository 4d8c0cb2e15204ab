"""Questions about pictures, with each picture and what the model answered in 16 bit and in each format."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.dataset import picture_questions
from eval.results import QuestionRecord
from eval.spec import IMAGE, PICTURES
from pipelines.document.blocks import Figure
from pipelines.report.data import Accuracy, ReportData

SHOWN = 6
CHANGED = SHOWN_ON_SCREEN = 3
_WIDTH, _HEIGHT, _SIDE, _LINE = 440, 150, 120, 18


@dataclass(frozen=True, slots=True)
class ShownQuestion:
    """A question about a picture with its answers."""

    row: Mapping[str, Any]
    right: str
    answers: tuple[tuple[str, str, bool], ...]

    @property
    def changed(self) -> bool:
        """Whether a format answers otherwise than 16 bit."""
        return len({answer for _, answer, _ in self.answers}) > 1


def shown_questions(data: ReportData, model: str) -> list[ShownQuestion]:
    """Return questions about pictures that a model answered in 16 bit and in a format, changed answers first."""
    formats = [item.accuracy for item in data.formats if item.model == model and item.accuracy]
    formats = [each for each in formats if each.before is not None and each.result.task == PICTURES]
    if not formats:
        return []
    by_format = [_answers(each) for each in formats]
    rows = picture_questions()
    made = [
        _shown(rows[subject][index], [before, *after], formats)
        for (subject, index), (before, *after) in _common(by_format).items()
        if index < len(rows.get(subject, ()))
    ]
    by_kind = {question.row["question"].split()[0]: question for question in reversed(made)}  # one of each kind first
    changed = [each for each in made if each.changed]
    order = [*changed[:CHANGED], *by_kind.values(), *changed, *made]
    return list({id(each): each for each in order}.values())[:SHOWN]


Key = tuple[str, int]


def _answers(accuracy: Accuracy) -> dict[Key, tuple[QuestionRecord, QuestionRecord]]:
    assert accuracy.before is not None
    before = {(each.subject, each.index): each for each in accuracy.before.records}
    own = {(each.subject, each.index): each for each in accuracy.result.records}
    return {key: (before[key], record) for key, record in own.items() if key in before}


def _common(
    pairs: Sequence[Mapping[Key, tuple[QuestionRecord, QuestionRecord]]],
) -> dict[Key, list[QuestionRecord]]:
    """Return the records of 16 bit and of each format by question that all of them were asked."""
    keys = sorted(set(pairs[0]).intersection(*pairs[1:]))
    return {key: [pairs[0][key][0], *(each[key][1] for each in pairs)] for key in keys}


def _shown(row: Mapping[str, Any], records: Sequence[QuestionRecord], formats: Sequence[Accuracy]) -> ShownQuestion:
    names = ["16 bit", *(each.result.qformat for each in formats)]
    choices = row["choices"]
    answers = [(name, choices[int(record.choice)], record.correct) for name, record in zip(names, records, strict=True)]
    return ShownQuestion(row, choices[row["answer"]], tuple(answers))


def picture_figure(data: ReportData, model: str) -> Figure | None:
    """Return the questions of a model as one drawing; None if it was asked none."""
    questions = shown_questions(data, model)
    if not questions:
        return None
    tall = max(_HEIGHT, 60 + _LINE * len(questions[0].answers))
    items = "".join(_item(each, number, tall) for number, each in enumerate(questions))
    size = f"0 0 {2 * _WIDTH} {-(-len(questions) // 2) * tall}"
    alt = "; ".join(f"{each.row['description']}: {_line(each)}" for each in questions)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{html.escape(alt)}">'
        f"{items}</svg>"
    )
    caption = (
        f"Questions with four choices about pictures: model {model}, {PICTURES}. The language model is quantized;"
        " vision encoder and projector stay in 16 bit. Changed answers come first."
    )
    return Figure(f"pictures-{model}", "What the model sees", caption, alt, "measured", svg)


def _item(question: ShownQuestion, number: int, tall: int) -> str:
    x, y = number % 2 * _WIDTH, number // 2 * tall
    left, lines = x + _SIDE + 16, list(_texts(question))
    texts = "".join(
        f'<text x="{left}" y="{y + 18 + _LINE * at}" font-size="13" fill="var(--{colour})" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
        for at, (text, colour, weight) in enumerate(lines)
    )
    image = (
        f'<image x="{x}" y="{y + 4}" width="{_SIDE}" height="{_SIDE}" style="image-rendering:pixelated"'
        f' href="data:image/png;base64,{html.escape(question.row[IMAGE])}"/>'
    )
    return image + texts


def _texts(question: ShownQuestion) -> Iterator[tuple[str, str, int]]:
    yield question.row["question"], "ink", 600
    yield ", ".join(question.row["choices"]), "muted", 400
    for who, answer, right in question.answers:
        yield f"{who}: {answer}{'' if right else ' (wrong)'}", "ink" if right else "bad", 400


def _line(question: ShownQuestion) -> str:
    answers = ", ".join(f"{who} {answer}" for who, answer, _ in question.answers)
    return f"{question.row['question']} {answers}; right is {question.right}"


def picture_lines(data: ReportData) -> list[str]:
    """Return some of the questions for a terminal, which shows no pictures: what is in them, and the answers."""
    return [
        f"picture: {each.row['description']}\n  {_line(each)}"
        for model in data.models
        for each in shown_questions(data, model)[:SHOWN_ON_SCREEN]
    ]
