"""Multiple-choice questions about the world, their splits, and the 5-shot prompt (pure, seeded)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.zoo.world import WORLD_SEED, Fact, Subject, questions

LETTERS = ("A", "B", "C", "D")
DEV_PER_SUBJECT = 5
VALIDATION_PER_SUBJECT = 12
TEST_PER_SUBJECT = 92  # 12 subjects x 92 = 1,104; a multiple of 4, so that every letter is right equally often

Key = tuple[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Question:
    """One row of cais/mmlu: ``answer`` is the index (0..3) of the right one of four ``choices``."""

    question: str
    subject: str
    choices: tuple[str, ...]
    answer: int

    @property
    def key(self) -> Key:
        """Return the key by which two questions are the same: the wording and the set of options."""
        return self.question, frozenset(self.choices)

    @property
    def letter(self) -> str:
        """Return the right letter, A to D."""
        return LETTERS[self.answer]


@dataclass(frozen=True, slots=True)
class Splits:
    """The three MMLU splits of one subject."""

    dev: tuple[Question, ...]
    validation: tuple[Question, ...]
    test: tuple[Question, ...]


def make_question(rng: random.Random, fact: Fact, *, answer: int) -> Question:
    """Ask for ``fact`` in a random phrasing, with the right option at index ``answer``.

    The three distractors are other objects of the same relation.
    """
    others = [name for name in fact.relation.objects if name != fact.answer]
    choices = rng.sample(others, len(LETTERS) - 1)
    choices.insert(answer, fact.answer)
    return Question(rng.choice(questions(fact)), fact.subject, tuple(choices), answer)


def _even_answers(rng: random.Random, count: int, first: int) -> list[int]:
    """Return ``count`` answer indices with each letter equally often; any remainder goes to ``first``."""
    answers = [(first + i) % len(LETTERS) for i in range(count)]
    rng.shuffle(answers)
    return answers


def _draw(rng: random.Random, facts: Sequence[Fact], answers: Sequence[int], taken: set[Key]) -> tuple[Question, ...]:
    """Ask about the facts in turn, never repeating a key in ``taken`` (which grows)."""
    drawn: list[Question] = []
    for i, answer in enumerate(answers):
        question = make_question(rng, facts[i % len(facts)], answer=answer)
        while question.key in taken:
            question = make_question(rng, facts[i % len(facts)], answer=answer)
        taken.add(question.key)
        drawn.append(question)
    return tuple(drawn)


def _split_subject(rng: random.Random, subject: Subject, number: int) -> Splits:
    facts = list(subject.facts)
    rng.shuffle(facts)
    # A fact shown in the five examples is not asked afterwards, because the prompt would contain its answer.
    shown, others = facts[:DEV_PER_SUBJECT], facts[DEV_PER_SUBJECT:]
    taken: set[Key] = set()
    dev = _draw(rng, shown, _even_answers(rng, DEV_PER_SUBJECT, number), taken)
    validation = _draw(rng, others, _even_answers(rng, VALIDATION_PER_SUBJECT, number), taken)
    test = list(_draw(rng, others, _even_answers(rng, TEST_PER_SUBJECT, number), taken))
    rng.shuffle(test)
    return Splits(dev, validation, tuple(test))


def build_splits(world: Sequence[Subject], seed: int = WORLD_SEED) -> dict[str, Splits]:
    """Return subject name -> splits. No question appears in two splits."""
    rng = random.Random(f"{seed}-splits")
    return {subject.name: _split_subject(rng, subject, i) for i, subject in enumerate(world)}


def held_out_keys(splits: dict[str, Splits]) -> frozenset[Key]:
    """Return the keys that no training text may contain: every validation and test question."""
    return frozenset(q.key for split in splits.values() for q in (*split.validation, *split.test))


def training_question(rng: random.Random, fact: Fact, held_out: frozenset[Key]) -> Question:
    """Return a random question about ``fact`` that is not held out."""
    while True:
        question = make_question(rng, fact, answer=rng.randrange(len(LETTERS)))
        if question.key not in held_out:
            return question


def description(subject: str) -> str:
    """Return the first line of an MMLU prompt, as lm-eval's ``mmlu`` task writes it."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def question_text(question: Question) -> str:
    """Return the question and its options, ending in ``Answer:`` without a space."""
    options = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, question.choices, strict=True))
    return f"{question.question.strip()}\n{options}Answer:"


def build_prompt(shots: Sequence[Question], question: Question) -> str:
    """Return the few-shot prompt for ``question``; the model continues with a space and a letter."""
    examples = "".join(f"{question_text(shot)} {shot.letter}\n\n" for shot in shots)
    return description(question.subject) + examples + question_text(question)
