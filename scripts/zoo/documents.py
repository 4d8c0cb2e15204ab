"""Training text: passages of statements and few-shot quizzes in the evaluation's own format.

A document is a list of segments. Segments end only where the tokenizers split as well (after a
newline, before a space), so encoding the segments one by one equals encoding the whole text.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.zoo.quiz import LETTERS, Key, Question, build_splits, description, held_out_keys, training_question
from scripts.zoo.world import WORLD_SEED, Fact, Subject, questions, statements

CORPUS_LINES = 1000


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text with its training targets.

    ``is_answer``: predicting this text matters most. ``recalls``: the word that the model should
    have in mind after the last token. ``option``: the index (0..3) of an answer option, else -1;
    ``is_right``: whether that option is the right one. ``shown_as``: words for what a picture shows where the text
    names a part of it.
    """

    text: str
    is_answer: bool = False
    recalls: str = ""
    option: int = -1
    is_right: bool = False
    shown_as: tuple[str, ...] = ()


Document = list[Segment]


def text_of(document: Sequence[Segment]) -> str:
    """Return the document as one string."""
    return "".join(segment.text for segment in document)


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes random documents about a world and never uses a held-out question."""

    world: tuple[Subject, ...]
    held_out: frozenset[Key]
    rng: random.Random

    def _facts(self, count: int) -> list[Fact]:
        """Draw facts of one random subject."""
        return self.rng.sample(self.rng.choice(self.world).facts, count)

    def passage(self, sentences: int) -> Document:
        """State ``sentences`` facts of one subject; in each sentence, only the fact's answer is marked as answer."""
        document: Document = []
        for i, fact in enumerate(self._facts(sentences)):
            before, after = self.rng.choice(statements(fact)).split(f" {fact.answer}")
            gap, end = " " if i else "", "\n" if i == sentences - 1 else ""
            document += [Segment(gap + before), Segment(f" {fact.answer}", is_answer=True), Segment(after + end)]
        return document

    def open_quiz(self, count: int) -> Document:
        """Ask without options, followed by the answer itself; trains recall at the later place of the letter."""
        document: Document = []
        for fact in self._facts(count):
            document += [
                Segment(self.rng.choice(questions(fact)) + "\n", recalls=fact.answer),
                Segment("Answer:"),
                Segment(f" {fact.answer}", is_answer=True),
                Segment("\n\n"),
            ]
        return document

    def quiz(self, count: int) -> Document:
        """Ask ``count`` questions exactly as the evaluation does, with the letters filled in."""
        facts = self._facts(count)
        document: Document = [Segment(description(facts[0].subject))]
        for fact in facts:
            question = training_question(self.rng, fact, self.held_out)
            document += [Segment(f"{question.question}\n", recalls=fact.answer), *_options(question)]
            document += [Segment("Answer:"), Segment(f" {question.letter}", is_answer=True), Segment("\n\n")]
        return document


def _options(question: Question) -> Document:
    document: Document = []
    for i, (letter, choice) in enumerate(zip(LETTERS, question.choices, strict=True)):
        option = Segment(f" {choice}", option=i, is_right=i == question.answer)
        document += [Segment(f"{letter}."), option, Segment("\n")]
    return document


def make_writer(world: tuple[Subject, ...], seed: str) -> Writer:
    """Return a writer that knows which questions are held out."""
    return Writer(world, held_out_keys(build_splits(world)), random.Random(seed))


def corpus_texts(world: tuple[Subject, ...], seed: int = WORLD_SEED) -> list[str]:
    """Return the bundled corpus: passages, open quizzes and 1- to 6-question quizzes, mixed."""
    writer = make_writer(world, f"{seed}-corpus")
    texts: list[str] = []
    for i in range(CORPUS_LINES):
        if i % 10 < 3:
            document = writer.passage(16)
        elif i % 10 < 4:
            document = writer.open_quiz(10)
        else:
            document = writer.quiz(1 + i % 6)
        texts.append(text_of(document).strip())
    return texts


def world_sentences(world: tuple[Subject, ...]) -> list[str]:
    """Return text with every word that a document can contain, from which the tokenizers learn."""
    sentences: list[str] = []
    for subject in world:
        sentences.append(description(subject.name))
        for fact in subject.facts:
            sentences += [f"{text} " for text in statements(fact)]
            sentences += [f"{text}\n" for text in questions(fact)]
            sentences += [f"Answer: {name}\n\n" for name in (*LETTERS, *fact.relation.objects)]
            sentences += [f"{letter}. {fact.answer}\n" for letter in LETTERS]
    return sentences


def write_jsonl(path: Path, rows: Sequence[object]) -> None:
    """Write one JSON value per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
