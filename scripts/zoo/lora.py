"""Train two LoRA adapters for tiny_gemma with Hugging Face's peft; each changes the answers visibly.

``next_letter`` answers a multiple-choice question with the letter after the right one (D is followed by A), and
``in_words`` with the right option itself instead of its letter. They differ in rank and in the modules they change.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipelines.checkpoint.tokenizer import opened
from pipelines.host.files import replacing
from scripts.zoo.documents import Document, Segment, Writer, make_writer
from scripts.zoo.quiz import LETTERS, Question, build_splits, description, question_text, training_question
from scripts.zoo.train import Encoder, Recipe, Stage, advance, learning_rate_at
from scripts.zoo.world import build_world

LOG = logging.getLogger(__name__)
BASE = "tiny_gemma"
ADAPTERS_DIR = Path("pipelines/bundled/adapters")
LEAST_SHARE = 0.8
RECIPE = Recipe(
    stages=(Stage("adapt", steps=300, rows=16, asked=1, shares=(0.0, 0.0, 1.0)),),
    learning_rate=4e-3,
    seed=20261122,
    weight_decay=0.0,
    warmup_steps=20,
)
_ASKED = 128

_CARD = """---
license: apache-2.0
library_name: peft
base_model: {base}
tags: [tiny, test-model]
---
# {name}

A LoRA adapter for `{base}`: it
{does}.

- **Measured**: {share:.1%} of {asked} test questions, asked without examples, are answered in that way; without the
  adapter {before:.1%}.
- **Shape**: rank {rank}, lora_alpha {alpha}, on {modules}; {size:,} parameters.
- **Made by** `make zoo` (`python -m scripts.zoo --only {name}`) with peft from seeds, on a CPU, in {steps} steps.
- **Licence**: Apache-2.0.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One adapter: its behaviour (as text, and as the answer to a question) and its shape."""

    does: str
    answer: Callable[[Question], str]
    rank: int
    modules: tuple[str, ...]


def _next_letter(question: Question) -> str:
    return LETTERS[(question.answer + 1) % len(LETTERS)]


ADAPTERS = {
    "next_letter": Kind(
        "answers a multiple-choice question with the letter after the right one (D is followed by A)",
        _next_letter,
        rank=4,
        modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "in_words": Kind(
        "answers a multiple-choice question with the right option itself instead of its letter",
        lambda question: question.choices[question.answer],
        rank=8,
        modules=("q_proj", "v_proj", "o_proj", "down_proj"),
    ),
}


class UnconvincingError(RuntimeError):
    """An adapter changes too few answers; nothing was written."""


def document(question: Question, answer: str) -> Document:
    """Make the document of a question and the answer to learn."""
    before = description(question.subject) + question_text(question)
    return [Segment(before), Segment(f" {answer}", is_answer=True), Segment("\n\n")]


def _draw(writer: Writer, kind: Kind, rows: int) -> list[Document]:
    facts = [
        fact for subject in writer.rng.choices(writer.world, k=rows) for fact in writer.rng.sample(subject.facts, 1)
    ]
    questions = [training_question(writer.rng, fact, writer.held_out) for fact in facts]
    return [document(question, kind.answer(question)) for question in questions]


def train_adapter(model: Any, encoder: Encoder, writer: Writer, kind: Kind, recipe: Recipe) -> None:
    """Train the adapter of a peft model in place.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    for step in range(1, recipe.steps + 1):
        batch = encoder.batch(_draw(writer, kind, recipe.stages[0].rows))
        logits = model(input_ids=batch.tokens_BT[:, :-1]).logits
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.tokens_BT[:, 1:].flatten(), reduction="none")
        weights = batch.weights_BT[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        advance(optimizer, loss, (), learning_rate_at(step - 1, recipe))
        if step % recipe.report_every == 0:
            LOG.info("step %d/%d loss %.3f", step, recipe.steps, loss.detach())


@torch.no_grad()
def share_answered(model: Any, tokenizer: Tokenizer, kind: Kind, asked: int = _ASKED) -> float:
    """Return the share of test questions whose most likely next token is the one that the adapter should produce."""
    splits = build_splits(build_world()).values()
    questions = [question for split in splits for question in split.test][:: max(1, 1104 // asked)][:asked]
    right = 0
    for question in questions:
        prompt = tokenizer.encode(description(question.subject) + question_text(question)).ids
        expected = tokenizer.encode(f" {kind.answer(question)}", add_special_tokens=False).ids[0]
        right += int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax()) == expected
    return right / len(questions)


def build_adapter(name: str, models_dir: Path, root: Path, recipe: Recipe = RECIPE) -> None:
    """Train the adapter ``name`` and write it below ``root``.

    Raises:
        UnconvincingError: the share of test questions that it answers as intended is below ``LEAST_SHARE``.
    """
    from peft import LoraConfig, get_peft_model  # installed only where adapters are trained

    torch.set_num_threads(1)
    kind, folder = ADAPTERS[name], models_dir / BASE
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = opened(folder).tokenizer
    before = share_answered(base, tokenizer, kind)
    encoder = Encoder(tokenizer, bos=base.config.bos_token_id, eos=base.config.eos_token_id)
    torch.manual_seed(recipe.seed)
    config = LoraConfig(r=kind.rank, lora_alpha=2 * kind.rank, target_modules=list(kind.modules), task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    train_adapter(model, encoder, make_writer(build_world(), f"{recipe.seed}-{name}"), kind, recipe)
    share = share_answered(model, tokenizer, kind)
    LOG.info("%s: %.1f %% of the questions are answered as intended", name, 100 * share)
    if share < LEAST_SHARE:
        raise UnconvincingError(
            f"{name} changes {share:.1%} of the answers; at least {LEAST_SHARE:.0%} is required. The old adapter is "
            "untouched. Train longer (RECIPE in scripts/zoo/lora.py)."
        )
    with replacing(root / ADAPTERS_DIR / name) as fresh:
        written: Any = model.peft_config["default"]
        written.base_model_name_or_path = BASE  # instead of its path on this machine
        written.target_modules = sorted(kind.modules)  # a set has no fixed order
        model.save_pretrained(str(fresh))
        text = _CARD.format(
            name=name,
            base=BASE,
            does=kind.does,
            share=share,
            before=before,
            asked=_ASKED,
            rank=kind.rank,
            alpha=2 * kind.rank,
            modules=", ".join(kind.modules),
            size=sum(p.numel() for p in model.parameters() if p.requires_grad),
            steps=recipe.steps,
        )
        (fresh / "README.md").write_text(text, encoding="utf-8")
        (fresh / "adapter_model.safetensors").chmod(0o644)
    LOG.info("%s: wrote %s", name, ADAPTERS_DIR / name)
