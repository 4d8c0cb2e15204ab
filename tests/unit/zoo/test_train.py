"""Training's small parts: what a batch marks, the learning rate, the losses, the refusal."""

import math

import pytest
import torch

from scripts.zoo import build
from scripts.zoo.build import KINDS, TooInaccurateError, build_model, special_ids
from scripts.zoo.documents import Segment, make_writer, world_sentences
from scripts.zoo.scoring import accuracy, letter_ids
from scripts.zoo.shapes import fresh_model, padded_vocab
from scripts.zoo.supervision import NOT_MARKED, Supervisor
from scripts.zoo.tokenizer import train_llama_tokenizer
from scripts.zoo.train import Encoder, Recipe, Stage, draw_documents, learning_rate_at
from scripts.zoo.world import build_world

pytestmark = pytest.mark.thorough

RECIPE = Recipe(stages=(Stage("one", 2, 4, 1, (0.3, 0.3, 0.4)),), learning_rate=1.0, seed=1, warmup_steps=1)
TOKENIZER = train_llama_tokenizer(["What?\n A\n B\n foo\n bar\n"])


def test_a_batch_marks_answer_recall_and_options():
    """BOS, the question (recalls foo), a right and a wrong option, the answer, EOS; then padding."""
    document = [
        Segment("What?\n", recalls="foo"),
        Segment(" foo", option=0, is_right=True),
        Segment(" bar", option=1),
        Segment(" A", is_answer=True),
    ]
    batch = Encoder(TOKENIZER, bos=1, eos=2).batch([document, []])
    foo = TOKENIZER.encode(" foo", add_special_tokens=False).ids[0]
    no = NOT_MARKED
    # "What?\n" is two tokens, "What" and "?\n"; the mark is on the second.
    assert batch.tokens_BT[0].tolist()[::6] == [1, 2]
    assert batch.recall_BT[0].tolist() == [no, no, foo, no, no, no, no]
    assert batch.right_BT[0].tolist() == [no, no, no, 1, 0, no, no]
    assert batch.option_BT[0].tolist() == [no, no, no, 0, 1, no, no]
    assert batch.weights_BT[0].tolist() == pytest.approx([0, 0.05, 0.05, 0.05, 0.05, 1, 0.05])
    assert batch.weights_BT[1].tolist() == pytest.approx([0, 0.05, 0, 0, 0, 0, 0])


def test_the_learning_rate_warms_up_and_falls():
    """Of 102 steps 2 warm up: 1/2, 1; half-way between there and the end 0.02 + 0.98 / 2 = 0.51."""
    recipe = Recipe(stages=(Stage("one", 102, 1, 1, (1, 0, 0)),), learning_rate=1.0, seed=1, warmup_steps=2)
    assert [learning_rate_at(step, recipe) for step in (0, 1, 2, 52)] == pytest.approx([0.5, 1.0, 1.0, 0.51])
    assert learning_rate_at(101, recipe) < 0.03


def test_the_schedule_runs_every_stage_in_turn():
    first, second = Stage("a", 2, 1, 1, (1, 0, 0)), Stage("b", 1, 1, 1, (1, 0, 0))
    recipe = Recipe(stages=(first, second), learning_rate=1.0, seed=1)
    assert list(recipe.schedule()) == [first, first, second]
    assert recipe.steps == 3


def test_accuracy_and_its_standard_error():
    """9 of 10: sqrt(0.9 * 0.1 / 10) = 0.0949."""
    assert accuracy([True] * 9 + [False]) == pytest.approx((0.9, 0.0949), abs=1e-4)


def test_a_vocabulary_is_padded_to_a_multiple_of_64():
    assert [padded_vocab(n) for n in (1, 64, 65, 1775)] == [64, 64, 128, 1792]


def test_letters_of_several_tokens_are_refused():
    """This tokenizer never saw " C": scoring one position would be wrong."""
    with pytest.raises(ValueError, match="each must be one token"):
        letter_ids(TOKENIZER)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_side_loss_reaches_the_weights(name):
    """A fresh model's loss is finite and every parameter gets a gradient."""
    kind, world = KINDS[name], build_world()
    tokenizer = kind.train_tokenizer(world_sentences(world))
    ids = special_ids(tokenizer, kind.specials)
    model = fresh_model(kind.config_json(tokenizer.get_vocab_size(), **ids))
    supervisor = Supervisor(model.config.hidden_size)
    encoder, writer = Encoder(tokenizer, bos=ids["bos"], eos=ids["eos"]), make_writer(world, "test")
    loss = supervisor(model, encoder.batch(draw_documents(writer, RECIPE.stages[0])))
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_untrained_model_is_refused(tmp_path, monkeypatch):
    """Two steps teach nothing: nothing is written, and the message says why."""
    full = build.build_splits

    def few(world):
        return dict(list(full(world).items())[:1])

    monkeypatch.setattr(build, "build_splits", few)
    with pytest.raises(TooInaccurateError, match=r"tiny_llama answers \d\d\.\d% .* at least 85%"):
        build_model("tiny_llama", tmp_path, RECIPE)
    assert list(tmp_path.iterdir()) == []
