"""Questions of the user's own: layouts that are read, and what is refused by file, row and column."""

import json
from pathlib import Path

import pytest

from eval.config import EvalSettings
from eval.dataset import read_own
from pipelines.domain.errors import UserError

ROWS = [
    ("1 + 1?", ["one", "two", "three"], 1),
    ("Capital of France?", ["Rome", "Paris"], 1),
    ("Red?", ["red", "ox"], 0),
]


def own(name: str, **settings: str) -> EvalSettings:
    """Settings of one's own questions."""
    return EvalSettings(task="local", path=Path("own.csv"), name=name, **settings)


def written(folder: Path, kind: str) -> Path:
    """The same questions in one of the layouts."""
    if kind == "columns.csv":
        text = "﻿Query,A,B,C,Answer Key\n1 + 1?,one,two,three,B\nCapital of France?,Rome,Paris,,b\nRed?,red,ox,,(A)\n"
        (folder / kind).write_text(text, encoding="utf-8")
    elif kind == "cell.csv":
        lines = [f'{q},"{json.dumps(c).replace(chr(34), 2 * chr(34))}",{c[a]}' for q, c, a in ROWS]
        (folder / kind).write_text("\n".join(["prompt,options,gold", *lines]))
    elif kind == "index.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(
            pa.Table.from_pylist([{"input": q, "choices": c, "label": a} for q, c, a in ROWS]), folder / kind
        )
    else:
        rows = [
            {"question": q, "choices": {"text": c, "label": ["x", "y", "z"][: len(c)]}, "answerKey": "xyz"[a]}
            for q, c, a in ROWS
        ]
        (folder / kind).write_text("\n".join(map(json.dumps, rows)))
    return folder / kind


@pytest.mark.parametrize("kind", ["columns.csv", "cell.csv", "index.parquet", "labels.jsonl"])
def test_layouts(tmp_path, kind) -> None:
    """Each gives the same questions."""
    found = read_own(written(tmp_path, kind), own("mine"))
    assert [(row["question"], row["choices"], row["answer"]) for row in found] == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,A,B,answer\n", "contains no questions"),
        (
            "question,A,B,answer\nq,x,y,C\n",
            r"row 1 \(line 2\), column 'answer': 'C' is not among its 2 choices \(read as letter\)",
        ),
        ("question,A,B,answer\nq,x,y,A\nr,x,x,A\n", r"row 2 .*column 'A/B': an empty or repeated choice"),
        ("question,A,B,answer\nq,x,,A\n", r"1 choice\(s\)"),
        ("question,A,B,C,answer\nq,x,y,z,1\n", "may be index0 or index1"),
        ("question,A,B,C,answer\nq,0,1,2,1\n", "Set eval.answers=index0 or eval.answers=index1 or eval.answers=text"),
        ("question,A,B,answer\nq,x,y,\n", "column 'answer': '' is not an answer"),
        ("frage,A,B,answer\nq,x,y,A\n", r"no column with the question.*frage.*eval\.question_column"),
        ("query,prompt,A,B,answer\nq,p,x,y,A\n", "query and prompt may each be the question"),
        ("question,A,B,answer,n\nq,x,y,A,1\n", r"columns A, B, n may each be a choice.*Rename or remove"),
        ("question,A,B,option_1,option_2,answer\nq,x,y,z,w,A\n", "columns option_1, option_2, A, B may each be"),
        ("question,n,answer\nq,1,A\n", "no column with the choices"),
        (
            "What is 1+1?,1,2,3,4,B\nWhat is 1+2?,1,2,3,4,C\n",
            r"1, 2, 3, 4, B may .*begins with a question.* line of names: question,A,B,C,D,ans",
        ),
        (
            "What is blue?,sea,sky,B\nWhat is red?,sea,fire,B\n",
            r"no column with the question.*begins with a question, give it a first line",
        ),
        (
            "question,A,B,answer\nq,x,y,A\nr,x,y,A\nq,y,x,B\nr,x,y,A\n",
            r"q\.csv, row 3 \(line 4\) asks the same as row 1 \(line 2\)\. .*Remove repeated rows \(2 of 4\)",
        ),
        (
            "question,A,B,answer\nq,x,y,A\nq,x,y,A\nq,x,y,B\n",
            r"row 3 \(line 4\) asks the same as row 1 \(line 2\), with another answer",
        ),
    ],
)
def test_refused(tmp_path, text, message) -> None:
    """With file, row and column."""
    file = tmp_path / "q.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=f"(?s){message}"):
        read_own(file, own("mine"))


def test_a_setting_settles_the_index(tmp_path) -> None:
    """1 is the second choice from 0 and the first from 1."""
    file = tmp_path / "q.csv"
    file.write_text("question,A,B,C,answer\nq,x,y,z,1\n")
    assert [read_own(file, own("m", answers=kind))[0]["answer"] for kind in ("index0", "index1")] == [1, 0]


def test_a_choice_that_only_late_rows_have(tmp_path) -> None:
    """All rows say which columns there are, not the first alone."""
    rows = [{"question": f"q{n}", "A": "x", "B": "y", "answer": "A"} for n in range(101)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "C": "z"}])))
    assert read_own(tmp_path / "q.jsonl", own("m"))[-1]["choices"] == ["x", "y", "z"]
