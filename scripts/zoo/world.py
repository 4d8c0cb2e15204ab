"""The synthetic domain of Veldan: subjects, entities, relations and facts (pure, seeded).

Every subject has its own entities and three relations; a fact is (entity, relation, object). The
objects of one relation form a small closed pool, so the other objects of the pool are fair
distractors: only somebody who knows the fact can tell the right one from the wrong ones.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

WORLD_SEED = 20261120
WORLD_NAME = "veldan"
ENTITIES_PER_SUBJECT = 12
OBJECTS_PER_RELATION = 8

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("l", "n", "r", "s", "th", "x")


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: ``noun`` is the kind of object, ``verb`` and ``verb_base`` link to it.

    The verb is given twice because "orbits" and "does ... orbit" cannot be derived from each other.
    """

    noun: str
    verb: str
    verb_base: str
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: ``entity`` is linked by ``relation`` to ``answer``, which is one of ``relation.objects``."""

    subject: str
    entity: str
    relation: Relation
    answer: str


@dataclass(frozen=True, slots=True)
class Subject:
    """One field of knowledge, with the MMLU category it counts towards and all its facts."""

    name: str
    category: str
    facts: tuple[Fact, ...]


# category -> field -> its three relations as (noun, verb, verb_base)
_FIELDS: dict[str, dict[str, tuple[tuple[str, str, str], ...]]] = {
    "stem": {
        "astronomy": (("star", "orbits", "orbit"), ("gas", "holds", "hold"), ("moon", "keeps", "keep")),
        "biology": (("habitat", "prefers", "prefer"), ("prey", "hunts", "hunt"), ("pigment", "shows", "show")),
        "chemistry": (("solvent", "needs", "need"), ("crystal", "forms", "form"), ("odour", "gives", "give")),
    },
    "humanities": {
        "history": (("ruler", "served", "serve"), ("siege", "survived", "survive"), ("treaty", "signed", "sign")),
        "law": (("court", "convenes", "convene"), ("penalty", "carries", "carry"), ("oath", "requires", "require")),
        "philosophy": (("virtue", "praised", "praise"), ("school", "founded", "found"), ("paradox", "posed", "pose")),
    },
    "social_sciences": {
        "economics": (("tax", "pays", "pay"), ("currency", "mints", "mint"), ("export", "sells", "sell")),
        "geography": (("river", "borders", "border"), ("province", "joins", "join"), ("harbour", "uses", "use")),
        "politics": (("party", "leads", "lead"), ("ally", "trusts", "trust"), ("rival", "fears", "fear")),
    },
    "other": {
        "cooking": (("spice", "takes", "take"), ("grain", "contains", "contain"), ("vessel", "fills", "fill")),
        "crafts": (("guild", "supplies", "supply"), ("tool", "employs", "employ"), ("fabric", "weaves", "weave")),
        "medicine": (("symptom", "causes", "cause"), ("organ", "attacks", "attack"), ("remedy", "resists", "resist")),
    },
}

# No template starts with a name, so that names always follow a space and are always a single token.
_STATEMENTS = (
    "The {noun} of {entity} is {answer}.",
    "It is known that {entity} {verb} {answer}.",
    "As the {noun}, {entity} {verb} {answer}.",
    "Scholars say {answer} is the {noun} of {entity}.",
)
_QUESTIONS = (
    "What is the {noun} of {entity}?",
    "Which {noun} does {entity} {verb_base}?",
    "Name the {noun} that {entity} {verb}.",
    "The {noun} of {entity} is",
)
# Verbs already in the past tense read better without "does".
_PAST_QUESTION = "Which {noun} did {entity} {verb_base}?"


def _names(rng: random.Random) -> Iterator[str]:
    """Yield an endless sequence of distinct, pronounceable two-syllable names."""
    seen: set[str] = set()
    while True:
        parts = (rng.choice(kind) for kind in (_ONSETS, _VOWELS, _CODAS, _ONSETS, _VOWELS, _CODAS))
        name = "".join(parts)
        if name not in seen:
            seen.add(name)
            yield name


def _spread(rng: random.Random, objects: tuple[str, ...], count: int) -> list[str]:
    """Return ``count`` objects in random order, with each one used about equally often."""
    whole, rest = divmod(count, len(objects))
    chosen = list(objects) * whole + rng.sample(objects, rest)
    rng.shuffle(chosen)
    return chosen


def _make_subject(
    rng: random.Random, names: Iterator[str], *, category: str, field: str, relations: tuple[tuple[str, str, str], ...]
) -> Subject:
    name = f"{WORLD_NAME}_{field}"
    entities = [next(names).capitalize() for _ in range(ENTITIES_PER_SUBJECT)]
    facts: list[Fact] = []
    for noun, verb, verb_base in relations:
        objects = tuple(next(names) for _ in range(OBJECTS_PER_RELATION))
        relation = Relation(noun, verb, verb_base, objects)
        answers = _spread(rng, objects, len(entities))
        facts += [Fact(name, entity, relation, answer) for entity, answer in zip(entities, answers, strict=True)]
    return Subject(name, category, tuple(facts))


def build_world(seed: int = WORLD_SEED) -> tuple[Subject, ...]:
    """Return every subject of the world, in category order; the same seed gives the same world.

    12 subjects x 12 entities x 3 relations = 432 facts.
    """
    rng = random.Random(seed)
    names = _names(rng)
    return tuple(
        _make_subject(rng, names, category=category, field=field, relations=relations)
        for category, fields in _FIELDS.items()
        for field, relations in fields.items()
    )


def _words(fact: Fact) -> dict[str, str]:
    relation = fact.relation
    return {
        "noun": relation.noun,
        "verb": relation.verb,
        "verb_base": relation.verb_base,
        "entity": fact.entity,
        "answer": fact.answer,
    }


def statements(fact: Fact) -> tuple[str, ...]:
    """Return every way to state the fact, each one sentence."""
    return tuple(template.format(**_words(fact)) for template in _STATEMENTS)


def questions(fact: Fact) -> tuple[str, ...]:
    """Return every way to ask for the fact; none of them names the answer."""
    past = fact.relation.verb.endswith("ed")  # "needs" and "feeds" do not end in "ed"
    templates = (*_QUESTIONS[:1], _PAST_QUESTION if past else _QUESTIONS[1], *_QUESTIONS[2:])
    return tuple(template.format(**_words(fact)) for template in templates)
