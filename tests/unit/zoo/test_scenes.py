"""The world of pictures: questions are right, deterministic, and shipped as they are made."""

import base64
import io
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from eval.dataset import MINI_PICTURES, picture_questions
from pipelines.domain.errors import UserError
from scripts.zoo.scenes import (
    COUNTS,
    KINDS,
    PLACES,
    SHAPES,
    SIDE,
    Scene,
    Thing,
    ask,
    description,
    draw_scene,
    held_out_questions,
    make_scene,
)

SCENE = Scene(
    40, (Thing(0, "circle", "red", 5, 0, 0), Thing(4, "ring", "blue", 5, 0, 0), Thing(8, "ring", "red", 5, 0, 0))
)


def answers(kind: str) -> dict[str, str]:
    rng = random.Random(0)
    asked = [each for _ in range(60) if (each := ask(rng, SCENE, kind))]
    return {each.question: each.word for each in asked}


def test_answers_are_what_the_picture_shows() -> None:
    assert answers("colour") == {"What colour is the circle?": "red"}
    assert answers("shape") == {"Which shape is blue?": "ring"}
    assert answers("place") == {"Where is the circle?": "northwest", "Where is the blue shape?": "centre"}
    assert answers("count") == {
        "How many shapes are there?": "three", "How many shapes are a circle?": "one",
        "How many shapes are a ring?": "two", "How many shapes are red?": "two", "How many shapes are blue?": "one",
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_stands_in_its_cell_in_its_colour(shape: str) -> None:
    drawn = np.asarray(draw_scene(Scene(40, (Thing(5, shape, "red", 6, 1, -1),))))
    rows, columns = np.nonzero((drawn != 40).any(-1))
    assert rows.min() >= 16
    assert rows.max() < 32
    assert columns.min() >= 32
    assert columns.max() < 48
    assert {tuple(each) for each in drawn[rows, columns]} == {(220, 40, 40)}


def test_shipped_questions_are_those_of_the_world() -> None:
    made, shipped = held_out_questions("test"), picture_questions()
    assert {kind: len(rows) for kind, rows in shipped.items()} == dict.fromkeys(sorted(KINDS), 100)
    for kind, rows in shipped.items():
        assert Counter(row["answer"] for row in rows) == dict.fromkeys(range(4), 25)
        for row, (scene, asked) in zip(rows, [each for each in made if each[1].kind == kind], strict=True):
            assert (row["question"], tuple(row["choices"])) == (asked.question, asked.choices)
            assert row["description"] == description(scene)
            image = Image.open(io.BytesIO(base64.b64decode(row["image"])))
            assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(draw_scene(scene)))
    assert image.size == (SIDE, SIDE)
    assert len({scene for scene, _ in made}) == 400
    assert not {scene for scene, _ in made} & {scene for scene, _ in held_out_questions("validation")}


def test_scenes_have_one_thing_in_a_cell() -> None:
    rng = random.Random(1)
    for scene in (make_scene(rng) for _ in range(50)):
        cells = [thing.cell for thing in scene.things]
        assert len(set(cells)) == len(cells) <= len(COUNTS)
        assert max(cells) < len(PLACES)


def test_questions_without_a_picture_are_refused(tmp_path) -> None:
    (tmp_path / "colour").mkdir()
    with pytest.raises(UserError, match="no questions about pictures"):
        picture_questions(tmp_path / "colour")
    row = (MINI_PICTURES / "colour" / "test.jsonl").read_text().splitlines()[0].replace('"image"', '"photo"')
    (tmp_path / "colour" / "test.jsonl").write_text(row + "\n")
    with pytest.raises(UserError, match="row 1: no image among"):
        picture_questions(tmp_path)
