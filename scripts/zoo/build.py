"""Build the shipped files from seeds: the question set, the corpus and the three models."""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipelines.checkpoint.tokenizer import opened
from pipelines.host.files import replacing
from scripts.zoo.dataset import write_dataset
from scripts.zoo.documents import corpus_texts, make_writer, world_sentences, write_jsonl
from scripts.zoo.draft import DRAFT_RECIPE, agreement, distil
from scripts.zoo.llava import SeeingRecipe, score_pictures, train_llava
from scripts.zoo.outliers import plant_outliers
from scripts.zoo.publish import Measured, card, draft_card, llava_card, parameters_of, write_llava, write_model
from scripts.zoo.quiz import Splits, build_splits
from scripts.zoo.scenes import held_out_questions, write_pictures
from scripts.zoo.scoring import accuracy, score
from scripts.zoo.shapes import draft_json, fresh_model, gemma_json, llama_json, qwen_json
from scripts.zoo.supervision import seek_equal_content
from scripts.zoo.tokenizer import (
    GEMMA_SPECIALS,
    LLAMA_SPECIALS,
    QWEN_SPECIALS,
    SpecialTokens,
    train_gemma_tokenizer,
    train_llama_tokenizer,
    train_qwen_tokenizer,
)
from scripts.zoo.train import Encoder, Recipe, Stage, Trainee, train
from scripts.zoo.world import WORLD_SEED, build_world

LOG = logging.getLogger(__name__)
MODELS_DIR = Path("pipelines/bundled/models")
CORPUS_PATH = Path("pipelines/bundled/corpus.jsonl")
DATA_DIR = Path("eval/mini_mmlu/data")
PICTURES_DIR = Path("eval/mini_pictures/data")
LLAVA = "tiny_llava"
# A model below this accuracy shows too little of the cost of quantization to be worth shipping.
LEAST_ACCURACY = 0.85
# Below this agreement, verifying a draft's guesses costs more than they save.
LEAST_AGREEMENT = 0.75
# Chosen by measurement: plain INT4 and magnitude pruning lose visibly, AWQ and SparseGPT hardly.
OUTLIER_SPREAD = 1.1

# Train first the facts, then finding the right option, then ignoring the five examples before the question.
RECIPE = Recipe(
    stages=(
        Stage("facts", steps=300, rows=32, asked=1, shares=(0.4, 0.4, 0.2)),
        Stage("match", steps=900, rows=12, asked=3, shares=(0.1, 0.1, 0.8)),
        Stage("full", steps=600, rows=8, asked=6, shares=(0.1, 0.1, 0.8)),
    ),
    learning_rate=1.5e-3,
    seed=WORLD_SEED,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Architecture-specific parts of a bundled model: tokenizer, special tokens and config."""

    train_tokenizer: Callable[[Iterable[str]], Tokenizer]
    specials: SpecialTokens
    config_json: Callable[..., dict[str, Any]]


KINDS = {
    "tiny_llama": Kind(train_llama_tokenizer, LLAMA_SPECIALS, llama_json),
    "tiny_gemma": Kind(train_gemma_tokenizer, GEMMA_SPECIALS, gemma_json),
    "tiny_qwen": Kind(train_qwen_tokenizer, QWEN_SPECIALS, qwen_json),
}


DRAFTS = {f"{name}_draft": name for name in ("tiny_llama", "tiny_gemma")}
"""Draft model -> its target model."""


class TooInaccurateError(RuntimeError):
    """A trained model is not accurate enough to be worth shipping; nothing was written."""


def build_data(root: Path) -> None:
    """Write mini_mmlu, mini_pictures and the corpus below the repository root ``root``."""
    world = build_world()
    with replacing(root / DATA_DIR) as fresh:
        write_dataset(world, fresh)
    with replacing(root / PICTURES_DIR) as fresh:
        write_pictures(fresh)
    with replacing(root / CORPUS_PATH) as fresh:
        write_jsonl(fresh, [{"text": text} for text in corpus_texts(world)])
    LOG.info("data: wrote %s, %s and %s", DATA_DIR, PICTURES_DIR, CORPUS_PATH)


def special_ids(tokenizer: Tokenizer, specials: SpecialTokens) -> dict[str, int]:
    """Return the ids of the special tokens that a config refers to.

    A model whose texts begin without a special token has that of the end as `bos`, as Qwen's own configs do.
    """
    names = {"bos": specials.bos or specials.eos, "eos": specials.eos, "pad": specials.pad}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def _encoder(tokenizer: Tokenizer, specials: SpecialTokens) -> Encoder:
    ids = special_ids(tokenizer, specials)
    return Encoder(tokenizer, bos=ids["bos"] if specials.bos else None, eos=ids["eos"])


def _fresh_model(config: dict[str, Any], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = fresh_model(config)
    seek_equal_content(model)
    return model


def _measure(name: str, model: PreTrainedModel, tokenizer: Tokenizer, splits: list[Splits], steps: int) -> Measured:
    right = score(model, tokenizer, splits, "test")
    share, error = accuracy(right)
    LOG.info("%s: test accuracy %.1f %% +- %.1f %% (bf16, 5-shot)", name, 100 * share, 100 * error)
    if share < LEAST_ACCURACY:
        raise TooInaccurateError(
            f"{name} answers {share:.1%} of the test questions; at least {LEAST_ACCURACY:.0%} is required. "
            "The old model is untouched. Train longer (RECIPE in scripts/zoo/build.py)."
        )
    return Measured(share, error, len(right), steps)


def build_model(name: str, root: Path, recipe: Recipe = RECIPE) -> None:
    """Train the model ``name``, measure its bf16 weights and write it below ``root``.

    Raises:
        TooInaccurateError: when the measured accuracy is below ``LEAST_ACCURACY``.
    """
    torch.set_num_threads(1)  # more threads change the order of sums, and so the weights, for little speed
    kind, world = KINDS[name], build_world()
    splits = list(build_splits(world).values())
    tokenizer = kind.train_tokenizer(world_sentences(world))
    ids = special_ids(tokenizer, kind.specials)
    config = kind.config_json(tokenizer.get_vocab_size(), **ids)
    encoder = _encoder(tokenizer, kind.specials)
    model = _fresh_model(config, recipe.seed)
    trainee = Trainee(model, tokenizer, encoder, make_writer(world, f"{recipe.seed}-training"))
    train(trainee, recipe, splits)
    finish_model(name, trainee, config, splits, recipe, root)


def finish_model(
    name: str, trainee: Trainee, config: dict[str, Any], splits: list[Splits], recipe: Recipe, root: Path
) -> None:
    """Plant outlier channels in the trained model, measure its bf16 weights and write it below ``root``."""
    model, tokenizer = trainee.model, trainee.tokenizer
    plant_outliers(model, spread=OUTLIER_SPREAD, seed=recipe.seed)
    model.bfloat16()  # measure the weights that are written
    measured = _measure(name, model, tokenizer, splits, recipe.steps)
    with replacing(root / MODELS_DIR / name) as fresh:
        readme = card(name, model, config, measured)
        write_model(model, config, tokenizer, KINDS[name].specials, readme, fresh)
    LOG.info("%s: wrote %s", name, MODELS_DIR / name)


def build_draft(name: str, root: Path, recipe: Recipe = DRAFT_RECIPE) -> None:
    """Distil the draft model ``name`` from its target, a bundled model, and write it below ``root``.

    Raises:
        TooInaccurateError: the share of tokens at which it agrees with its target is below ``LEAST_AGREEMENT``.
    """
    torch.set_num_threads(1)
    target_name = DRAFTS[name]
    folder = root / MODELS_DIR / target_name
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = opened(folder).tokenizer
    config = draft_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    encoder = _encoder(tokenizer, KINDS[target_name].specials)
    torch.manual_seed(recipe.seed)
    draft = fresh_model(config)
    unseen = distil(draft, target, encoder, make_writer(build_world(), f"{recipe.seed}-draft"), recipe)
    draft.bfloat16()  # measure the weights that are written
    share = agreement(draft, target, unseen)
    LOG.info("%s: agrees with %s on %.1f %% of the tokens", name, target_name, 100 * share)
    if share < LEAST_AGREEMENT:
        raise TooInaccurateError(
            f"{name} agrees with {target_name} on {share:.1%} of the tokens; at least {LEAST_AGREEMENT:.0%} is"
            " required. The old model is untouched. Train longer (DRAFT_RECIPE in scripts/zoo/draft.py)."
        )
    readme = draft_card(
        name,
        draft,
        config,
        target=target_name,
        target_parameters=parameters_of(target),
        agreement=share,
        steps=recipe.steps,
    )
    with replacing(root / MODELS_DIR / name) as fresh:
        write_model(draft, config, tokenizer, KINDS[target_name].specials, readme, fresh)
    LOG.info("%s: wrote %s", name, MODELS_DIR / name)


def build_llava(root: Path, recipe: SeeingRecipe | None = None) -> None:
    """Teach tiny_llama to see, measure the bf16 weights and write tiny_llava below ``root``.

    Raises:
        TooInaccurateError: it answers fewer than ``LEAST_ACCURACY`` of the questions about held-out pictures.
    """
    torch.set_num_threads(1)
    recipe, world = recipe or SeeingRecipe(), build_world()
    source = root / MODELS_DIR / "tiny_llama"
    model, tokenizer = train_llava(
        source, world, recipe, lambda language: plant_outliers(language, spread=OUTLIER_SPREAD, seed=recipe.seed)
    )
    by_kind = score_pictures(model, tokenizer, held_out_questions("test"))
    right = [each for kind in by_kind.values() for each in kind]
    share, error = accuracy(right)
    texts, _ = accuracy(score(model, tokenizer, list(build_splits(world).values()), "test"))
    LOG.info(
        "%s: test accuracy %.1f %% +- %.1f %% (bf16), mini_mmlu %.1f %%", LLAVA, 100 * share, 100 * error, 100 * texts
    )
    if share < LEAST_ACCURACY:
        raise TooInaccurateError(
            f"{LLAVA} answers {share:.1%} of the questions about pictures; at least {LEAST_ACCURACY:.0%} is required."
            " The old model is untouched. Train longer (SeeingRecipe in scripts/zoo/llava.py)."
        )
    kinds = {kind: sum(each) / len(each) for kind, each in by_kind.items()}
    readme = llava_card(model, Measured(share, error, len(right), recipe.steps), kinds, texts)
    text_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    with replacing(root / MODELS_DIR / LLAVA) as fresh:
        write_llava(model, text_config, tokenizer, LLAMA_SPECIALS, readme, fresh)
    LOG.info("%s: wrote %s", LLAVA, MODELS_DIR / LLAVA)
