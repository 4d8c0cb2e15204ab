"""The world of small pictures: coloured shapes on a grid, and questions about them (pure, seeded).

A picture has three by three cells, each empty or with one shape, drawn without smoothing, so that equal descriptions
give equal bytes. A question has four choices, of which only a look at the picture tells the right one.
"""

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from scripts.zoo.documents import write_jsonl
from scripts.zoo.quiz import LETTERS
from scripts.zoo.world import WORLD_SEED

CELLS, CELL = 3, 16
SIDE = CELLS * CELL
"""Pixels of a picture's side."""
SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 90, 230), "yellow": (240, 210, 50),
    "purple": (160, 60, 190), "white": (245, 245, 245),
}  # fmt: skip
PLACES = ("northwest", "north", "northeast", "west", "centre", "east", "southwest", "south", "southeast")
COUNTS = ("one", "two", "three", "four", "five", "six")
MOST_SHAPES = 6
TEST_PER_KIND = 100
IMAGE_TOKEN = "<image>"
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""Of the three colours: what the encoder takes is (value / 255 - mean) / deviation."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in a cell: its size is half its width in pixels, (dx, dy) its distance from the cell's middle."""

    cell: int
    shape: str
    colour: str
    size: int
    dx: int
    dy: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows, on a grey of this brightness."""

    grey: int
    things: tuple[Thing, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a scene, or a thing in it: ``answer`` is the index (0..3) of the right one of ``choices``."""

    kind: str
    question: str
    choices: tuple[str, ...]
    answer: int
    about: Thing | None = None

    @property
    def word(self) -> str:
        """Return the right choice."""
        return self.choices[self.answer]


def draw_scene(scene: Scene) -> Image.Image:
    """Draw a scene, 48 x 48 pixels."""
    image = Image.new("RGB", (SIDE, SIDE), (scene.grey,) * 3)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        x = thing.cell % CELLS * CELL + CELL // 2 + thing.dx
        y = thing.cell // CELLS * CELL + CELL // 2 + thing.dy
        _draw_thing(pen, thing, x, y)
    return image


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, x: int, y: int) -> None:
    r, colour = thing.size, COLOURS[thing.colour]
    box = (x - r, y - r, x + r, y + r)
    if thing.shape == "circle":
        pen.ellipse(box, fill=colour)
    elif thing.shape == "ring":
        pen.ellipse(box, outline=colour, width=2)
    elif thing.shape == "square":
        pen.rectangle(box, fill=colour)
    elif thing.shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif thing.shape == "diamond":
        pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=colour)
    else:
        pen.rectangle((x - 1, y - r, x + 1, y + r), fill=colour)
        pen.rectangle((x - r, y - 1, x + r, y + 1), fill=colour)


def make_scene(rng: random.Random) -> Scene:
    """Return a random scene of one to six shapes; some have few colours and kinds, so that there is more to count."""
    count = rng.randint(1, MOST_SHAPES)
    shapes = rng.sample(SHAPES, rng.randint(1, len(SHAPES)))
    colours = rng.sample(tuple(COLOURS), rng.randint(1, len(COLOURS)))
    cells = rng.sample(range(CELLS**2), count)
    things = (
        Thing(cell, rng.choice(shapes), rng.choice(colours), rng.randint(4, 6), rng.randint(-1, 1), rng.randint(-1, 1))
        for cell in sorted(cells)
    )
    return Scene(rng.randint(10, 90), tuple(things))


@dataclass(frozen=True, slots=True)
class _Fact:
    """What can be asked about a scene: the right answer is one of ``pool``."""

    kind: str
    question: str
    right: str
    pool: tuple[str, ...]
    about: Thing | None = None


def _facts(scene: Scene) -> Iterator[_Fact]:
    shapes = [thing.shape for thing in scene.things]
    colours = [thing.colour for thing in scene.things]
    for thing in scene.things:
        place = PLACES[thing.cell]
        if shapes.count(thing.shape) == 1:
            yield _Fact("colour", f"What colour is the {thing.shape}?", thing.colour, tuple(COLOURS), thing)
            yield _Fact("place", f"Where is the {thing.shape}?", place, PLACES, thing)
        if colours.count(thing.colour) == 1:
            yield _Fact("shape", f"Which shape is {thing.colour}?", thing.shape, SHAPES, thing)
            yield _Fact("place", f"Where is the {thing.colour} shape?", place, PLACES, thing)
    yield _Fact("count", "How many shapes are there?", COUNTS[len(shapes) - 1], COUNTS)
    for shape in sorted(set(shapes)):
        yield _Fact("count", f"How many shapes are a {shape}?", COUNTS[shapes.count(shape) - 1], COUNTS)
    for colour in sorted(set(colours)):
        yield _Fact("count", f"How many shapes are {colour}?", COUNTS[colours.count(colour) - 1], COUNTS)


KINDS = ("colour", "count", "place", "shape")


def ask(rng: random.Random, scene: Scene, kind: str, *, answer: int | None = None) -> Asked | None:
    """Return a random question of a kind about a scene; None if nothing of the kind can be asked."""
    facts = [fact for fact in _facts(scene) if fact.kind == kind]
    if not facts:
        return None
    fact = rng.choice(facts)
    choices = rng.sample([each for each in fact.pool if each != fact.right], len(LETTERS) - 1)
    place = rng.randrange(len(LETTERS)) if answer is None else answer
    choices.insert(place, fact.right)
    return Asked(kind, fact.question, tuple(choices), place, fact.about)


def held_out_questions(split: str, per_kind: int = TEST_PER_KIND, seed: int = WORLD_SEED) -> list[tuple[Scene, Asked]]:
    """Return questions of each kind, each about a picture of its own; every letter is right equally often."""
    rng = random.Random(f"{seed}-scenes-{split}")
    questions: list[tuple[Scene, Asked]] = []
    for kind in KINDS:
        answers = [at % len(LETTERS) for at in range(per_kind)]
        rng.shuffle(answers)
        for answer in answers:
            question = None
            while question is None:
                scene = make_scene(rng)
                question = ask(rng, scene, kind, answer=answer)
            questions.append((scene, question))
    return questions


def description(scene: Scene) -> str:
    """Return what a picture shows in words."""
    return ", ".join(f"{thing.colour} {thing.shape} {PLACES[thing.cell]}" for thing in scene.things)


def _png(scene: Scene) -> bytes:
    file = io.BytesIO()
    draw_scene(scene).quantize(16, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


_README = """# mini_pictures

{questions} multiple-choice questions, each about a picture of its own: {side} x {side} pixels with one to six coloured
shapes on a grid of three by three. The pictures of `tiny_llava`'s training are others.

- `<kind>/test.jsonl`: rows as in cais/mmlu (`question`, `subject`, four `choices`, `answer` = index of the right one),
  with `image`, a PNG in base64, and its `description` in words. Every letter is right equally often.
- Kinds: {kinds}.

Made from a seed by `make zoo` (`scripts/zoo/scenes.py`); do not edit by hand. Licence: Apache-2.0, as the repository.
"""


def write_pictures(out_dir: Path) -> None:
    """Write the questions about held-out pictures, one folder per kind, and README.md into ``out_dir``."""
    questions = held_out_questions("test")
    for kind in KINDS:
        rows = [
            {
                "question": question.question,
                "subject": kind,
                "choices": list(question.choices),
                "answer": question.answer,
                "description": description(scene),
                "image": base64.b64encode(_png(scene)).decode(),
            }
            for scene, question in questions
            if question.kind == kind
        ]
        write_jsonl(out_dir / kind / "test.jsonl", rows)
    text = _README.format(questions=len(questions), side=SIDE, kinds=", ".join(KINDS))
    (out_dir / "README.md").write_text(text, encoding="utf-8")


def scene_sentences() -> list[str]:
    """Return text with every word of the questions, from which the tokenizer learns."""
    questions = [
        "What colour is the circle?\n", "Where is the circle?\n", "Which shape is red?\n", "Where is the red shape?\n",
        "How many shapes are there?\n", "How many shapes are a circle?\n", "How many shapes are red?\n",
    ]  # fmt: skip
    words = [word for pool in (SHAPES, tuple(COLOURS), PLACES, COUNTS) for word in pool]
    # " circle?" and " circle" are the same token, because a word ends before its punctuation
    return [*questions, *(f"Answer: {word}\n\n" for word in words), *(f"A. {word}\n" for word in words)]


def pixels_of(image: Image.Image, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Return a picture as CLIP's processor prepares it where it has the right size, float32 [3, side, side]."""
    raw = np.asarray(image, dtype=np.float32) / 255
    return ((raw - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)).transpose(2, 0, 1)
