"""Teach tiny_llama to see: a small CLIP encoder and a projector before it, trained on the world of pictures.

First encoder and projector learn to name what each cell of a picture shows. Then all parts learn together to answer
questions, with the auxiliary losses of `supervision`, and some texts are mixed in, so that the language model keeps
what it knows. Shapes: B pictures, T tokens, D width of the language model, E that of the encoder.
"""

# ruff: noqa: N812 (shape suffixes, and torch's own name for its functions)
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from pipelines.checkpoint.tokenizer import opened
from scripts.zoo.documents import Document, Segment, make_writer, world_sentences
from scripts.zoo.quiz import LETTERS
from scripts.zoo.scenes import (
    CELLS,
    COLOURS,
    IMAGE_TOKEN,
    KINDS,
    MEAN,
    PLACES,
    SHAPES,
    SIDE,
    STD,
    Asked,
    Scene,
    ask,
    draw_scene,
    held_out_questions,
    make_scene,
    pixels_of,
    scene_sentences,
)
from scripts.zoo.shapes import padded_vocab
from scripts.zoo.supervision import Supervisor, seek_equal_content
from scripts.zoo.tokenizer import LLAMA_SPECIALS, train_llama_tokenizer
from scripts.zoo.train import Encoder, Recipe, Stage, advance, draw_documents, learning_rate_at, optimizer_of
from scripts.zoo.world import WORLD_SEED, Subject

LOG = logging.getLogger(__name__)
PATCH = 8
VISION = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": PATCH, "hidden_act": "quick_gelu",
}  # fmt: skip
VISUAL_TOKENS = (SIDE // PATCH) ** 2
_SPACE = "\u0120"  # a space in byte-level BPE
_LOOK_LAYER, _LOOK_STD = 0, 0.08
"""Where a word finds the patches of what it names: one head starts so that it attends to equal content."""
_LOOK_WEIGHT, _NAME_WEIGHT = 0.5, 0.1
_TEXTS = Stage("texts", steps=0, rows=4, asked=4, shares=(0.2, 0.2, 0.6))
_TEXT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Looks:
    """A stage of the whole: steps, pictures of a step, questions of a picture, share of those with choices."""

    steps: int
    pictures: int
    asked: int
    with_choices: float


@dataclass(frozen=True, slots=True)
class SeeingRecipe:
    """How to train: steps of the encoder, then rounds of the whole, each with a learning rate that rises and falls."""

    encoder_steps: int = 400
    encoder_pictures: int = 48
    rounds: tuple[tuple[Looks, ...], ...] = (
        (Looks(250, 12, 6, 0.0), Looks(550, 8, 3, 0.85)),
        (Looks(1500, 8, 4, 0.6),),
    )
    encoder_rate: float = 1.5e-3
    learning_rate: float = 1.2e-3
    seed: int = WORLD_SEED
    report_every: int = 50

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the encoder alone and of the whole."""
        return self.encoder_steps + sum(stage.steps for stages in self.rounds for stage in stages)


def make_tokenizer(world: tuple[Subject, ...]) -> Tokenizer:
    """Return tiny_llama's kind of tokenizer with the words about pictures, and the token for a picture."""
    tokenizer = train_llama_tokenizer([*world_sentences(world), *scene_sentences()])
    tokenizer.add_special_tokens([IMAGE_TOKEN])
    return tokenizer


def fresh_llava(language: Path, tokenizer: Tokenizer, seed: int) -> LlavaForConditionalGeneration:
    """Return a LLaVA with tiny_llama's weights behind a random encoder and projector, float32.

    Rows of the embedding and of the head move to the ids that the same words have in the new tokenizer; new words start
    at random.
    """
    torch.manual_seed(seed)
    old: Any = LlamaForCausalLM.from_pretrained(language, dtype=torch.float32)
    text = LlamaConfig.from_pretrained(language)
    ids = {name: tokenizer.token_to_id(token) for name, token in LLAMA_SPECIALS.named().items()}
    text.vocab_size = padded_vocab(tokenizer.get_vocab_size())
    text.bos_token_id, text.eos_token_id, text.pad_token_id = ids["bos_token"], ids["eos_token"], ids["pad_token"]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=text,
        image_token_index=tokenizer.token_to_id(IMAGE_TOKEN),
        vision_feature_layer=-1,
        image_seq_length=VISUAL_TOKENS,
    )
    model = LlavaForConditionalGeneration(config).float()
    _fold_norms(old)
    seek_equal_content(old, _LOOK_LAYER, _LOOK_STD)
    own = model.model.language_model.state_dict()
    layers = {name: values for name, values in old.model.state_dict().items() if "embed_tokens" not in name}
    model.model.language_model.load_state_dict({**own, **layers})
    rows_of, vocabulary = opened(language).tokenizer.get_vocab(), tokenizer.get_vocab()
    common = [(row, rows_of[token]) for token, row in vocabulary.items() if token in rows_of]
    new, before = map(torch.tensor, zip(*common, strict=True))
    with torch.no_grad():
        for to, of in ((model.get_input_embeddings(), old.get_input_embeddings()), (model.lm_head, old.lm_head)):
            to.weight.normal_(std=float(of.weight[before].std()))
            to.weight[new] = of.weight[before]
    return model


@torch.no_grad()
def _fold_norms(model: LlamaForCausalLM) -> None:
    """Take the planted outliers out again, exactly but for the last bits: Adam's steps do not fit such channels."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for linear in linears:
                linear.weight *= norm.weight
            norm.weight.fill_(1.0)
        scale = mlp.up_proj.weight.norm(dim=1, keepdim=True) / mlp.up_proj.weight.norm(dim=1).mean()
        mlp.up_proj.weight /= scale
        mlp.down_proj.weight *= scale.T
        scale = attention.v_proj.weight.norm(dim=1, keepdim=True) / attention.v_proj.weight.norm(dim=1).mean()
        attention.v_proj.weight /= scale
        heads, size = model.config.num_attention_heads, attention.head_dim
        kv = attention.v_proj.weight.shape[0] // size
        spread = scale.view(kv, 1, size).expand(-1, heads // kv, -1).reshape(-1)
        attention.o_proj.weight *= spread


def _unit_rms(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)


def pixels(scenes: Sequence[Scene]) -> Tensor:
    """Return prepared pictures, float32 [B, 3, side, side]."""
    return torch.from_numpy(np.stack([pixels_of(draw_scene(scene), MEAN, STD) for scene in scenes]))


class PatchNamer(nn.Module):
    """Draws the features of each patch to the embeddings of the words for what its cell shows, and where it is.

    So the language model meets pictures as words that it can compare with those of a question. Exists only during
    training.
    """

    def __init__(self, model: LlavaForConditionalGeneration, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._embedding = [model.get_input_embeddings()]  # in a list, so that it is not a part of this module
        pools = (SHAPES, tuple(COLOURS), PLACES)
        self._ids = [torch.tensor([tokenizer.token_to_id(f"{_SPACE}{word}") for word in pool]) for pool in pools]
        self.nothing = nn.Parameter(torch.randn(2, model.config.text_config.hidden_size) * 0.02)

    def forward(self, features: Tensor, scenes: Sequence[Scene]) -> Tensor:
        """Return the loss of features [B, patches, D]."""
        side, embedding = SIDE // PATCH, self._embedding[0].weight
        right = torch.tensor([_of_cells(scene) for scene in scenes])  # [B, cells, 3]
        cells = torch.arange(CELLS**2).view(CELLS, CELLS)
        of = cells.repeat_interleave(side // CELLS, 0).repeat_interleave(side // CELLS, 1).flatten()
        right = right[:, of]
        loss, size = features.new_zeros(()), features.shape[-1]
        for at, ids in enumerate(self._ids):
            words = (
                embedding[ids] if at == len(self._ids) - 1 else torch.cat([embedding[ids], self.nothing[at : at + 1]])
            )
            logits = _unit_rms(features) @ _unit_rms(words).T / math.sqrt(size)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), right[..., at].flatten())
        scale = embedding.detach().pow(2).mean().sqrt()
        return loss + 0.1 * (features.pow(2).mean(-1).sqrt() / scale - 1.0).pow(2).mean()


def _of_cells(scene: Scene) -> list[tuple[int, int, int]]:
    """Return by cell the indices of its shape, its colour and its place; the last index is that of nothing."""
    cells = [(len(SHAPES), len(COLOURS), cell) for cell in range(CELLS**2)]
    for thing in scene.things:
        cells[thing.cell] = SHAPES.index(thing.shape), list(COLOURS).index(thing.colour), thing.cell
    return cells


def _features(model: LlavaForConditionalGeneration, pixel_values: Tensor) -> Tensor:
    """Return what the language model sees of pictures [B, patches, D]."""
    output: Any = model.model.vision_tower(pixel_values=pixel_values)
    return model.model.multi_modal_projector(output.last_hidden_state[:, 1:])  # type: ignore[no-any-return]


def _scenes(rng: random.Random, count: int, held_out: frozenset[Scene]) -> list[Scene]:
    made: list[Scene] = []
    while len(made) < count:
        if (scene := make_scene(rng)) not in held_out:
            made.append(scene)
    return made


def train_encoder(
    model: LlavaForConditionalGeneration, namer: PatchNamer, recipe: SeeingRecipe, held_out: frozenset[Scene]
) -> None:
    """Teach encoder and projector to name what each patch shows."""
    rng = random.Random(f"{recipe.seed}-encoder")
    stages = (Stage("encoder", recipe.encoder_steps, recipe.encoder_pictures, 0, (0, 0, 0)),)
    rates = Recipe(stages=stages, learning_rate=recipe.encoder_rate, seed=recipe.seed, warmup_steps=50)
    modules = [model.model.vision_tower, model.model.multi_modal_projector, namer]
    optimizer = optimizer_of(modules, rates)
    started = time.monotonic()
    for step in range(1, recipe.encoder_steps + 1):
        scenes = _scenes(rng, recipe.encoder_pictures, held_out)
        loss = namer(_features(model, pixels(scenes)), scenes)
        advance(optimizer, loss, modules, learning_rate_at(step - 1, rates))
        if step % recipe.report_every == 0:
            minutes = (time.monotonic() - started) / 60
            LOG.info("encoder step %d loss %.4f after %.1f min", step, float(loss.detach()), minutes)


def document(rng: random.Random, scene: Scene, questions: int, with_choices: float) -> Document:
    """Return a picture's place and questions about it with their answers, this share of them with choices."""
    made: Document = [Segment(IMAGE_TOKEN)] * VISUAL_TOKENS + [Segment("\n")]
    while questions:
        question = ask(rng, scene, rng.choice(KINDS))
        if question is None:
            continue
        questions -= 1
        choices = rng.random() < with_choices
        made += _question(question)
        for at, (letter, choice) in enumerate(zip(LETTERS, question.choices, strict=True) if choices else ()):
            option = Segment(f" {choice}", option=at, is_right=at == question.answer)
            made += [Segment(f"{letter}."), option, Segment("\n")]
        answer = LETTERS[question.answer] if choices else question.word
        made += [Segment("Answer:"), Segment(f" {answer}", is_answer=True), Segment("\n\n")]
    return made


def _question(question: Asked) -> Document:
    """Return a question; the word that names the thing in it is one of its own, with what the picture shows of it."""
    if (thing := question.about) is None:
        return [Segment(f"{question.question}\n", recalls=question.word)]
    name = f" {thing.shape if thing.shape in question.question else thing.colour}"
    before, after = question.question.split(name)
    shown = thing.shape, thing.colour, PLACES[thing.cell]
    return [Segment(before), Segment(name, shown_as=shown), Segment(f"{after}\n", recalls=question.word)]


class _WithPictures:
    """A LLaVA and pictures behind the interface of a language model that `Supervisor` takes."""

    def __init__(self, model: LlavaForConditionalGeneration, pixel_values: Tensor | None) -> None:
        self._model, self._pixels, self.config = model, pixel_values, model.config.text_config

    def __call__(self, input_ids: Tensor, **settings: Any) -> Any:
        self.output = self._model(input_ids=input_ids, pixel_values=self._pixels, **settings)
        return self.output

    def get_input_embeddings(self) -> nn.Module:
        return self._model.get_input_embeddings()


@torch.no_grad()
def score_pictures(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, questions: Sequence[tuple[Scene, Asked]]
) -> dict[str, list[bool]]:
    """Return by kind for each question whether the most likely of its choices is right, asked as in mini_pictures."""
    right = {kind: list[bool]() for kind in KINDS}
    for start in range(0, len(questions), 32):
        some = questions[start : start + 32]
        rows = [
            tokenizer.encode(f"{IMAGE_TOKEN * VISUAL_TOKENS}\n{question.question}\nAnswer:").ids for _, question in some
        ]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        logits = model(input_ids=tokens, pixel_values=pixels([scene for scene, _ in some]).to(model.dtype)).logits
        for at, ((_, question), row) in enumerate(zip(some, rows, strict=True)):
            words = [tokenizer.token_to_id(f"{_SPACE}{choice}") for choice in question.choices]
            right[question.kind].append(int(logits[at, len(row) - 1, words].argmax()) == question.answer)
    return right


def train_whole(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    namer: PatchNamer,
    world: tuple[Subject, ...],
    recipe: SeeingRecipe,
    held_out: frozenset[Scene],
    number: int = 0,
) -> None:
    """Train all parts together for a round, on questions about pictures and with every fourth step on texts."""
    tag, stages_of_round = f"-{number}" if number else "", recipe.rounds[number]
    rng, writer = random.Random(f"{recipe.seed}-whole{tag}"), make_writer(world, f"{recipe.seed}-seeing{tag}")
    supervisor = Supervisor(model.config.text_config.hidden_size)
    encoder = Encoder(
        tokenizer, bos=tokenizer.token_to_id(LLAMA_SPECIALS.bos), eos=tokenizer.token_to_id(LLAMA_SPECIALS.eos)
    )
    stages = tuple(Stage("", each.steps, each.pictures, each.asked, (0, 0, 0)) for each in stages_of_round)
    schedule = [each for each in stages_of_round for _ in range(each.steps)]
    rates = Recipe(stages=stages, learning_rate=recipe.learning_rate, seed=recipe.seed)
    modules = [model, supervisor, namer]
    optimizer = optimizer_of(modules, rates)
    validation = held_out_questions("validation", 25)
    started = time.monotonic()
    for step, stage in enumerate(schedule, start=1):
        if step % _TEXT_EVERY == 0:
            documents, scenes = draw_documents(writer, _TEXTS), list[Scene]()
        else:
            scenes = _scenes(rng, stage.pictures, held_out)
            documents = [document(rng, scene, stage.asked, stage.with_choices) for scene in scenes]
        loss = _loss(model, supervisor, namer, encoder, documents, scenes)
        advance(optimizer, loss, modules, learning_rate_at(step - 1, rates))
        if step % recipe.report_every == 0:
            shares = {
                kind: sum(each) / len(each) for kind, each in score_pictures(model, tokenizer, validation).items()
            }
            minutes = (time.monotonic() - started) / 60
            text = " ".join(f"{kind} {share:.2f}" for kind, share in shares.items())
            LOG.info("step %d/%d %s after %.1f min", step, len(schedule), text, minutes)


def _loss(
    model: LlavaForConditionalGeneration,
    supervisor: Supervisor,
    namer: PatchNamer,
    encoder: Encoder,
    documents: Sequence[Document],
    scenes: Sequence[Scene],
) -> Tensor:
    """Return the loss on documents, each about its picture; without pictures that of `Supervisor` alone."""
    batch = encoder.batch(documents)
    if not scenes:
        return supervisor(_WithPictures(model, None), batch)  # type: ignore[no-any-return]
    pixel_values = pixels(scenes)
    seeing = _WithPictures(model, pixel_values)
    loss: Tensor = supervisor(seeing, batch)
    look_loss = _look_loss(model, seeing.output.hidden_states[_LOOK_LAYER + 1], encoder, documents)
    return loss + _LOOK_WEIGHT * look_loss + _NAME_WEIGHT * namer(_features(model, pixel_values), scenes)


def _look_loss(
    model: LlavaForConditionalGeneration, hidden: Tensor, encoder: Encoder, documents: Sequence[Document]
) -> Tensor:
    """Return the loss of finding, at the word for a thing, all that the picture shows of it."""
    rows, columns, words = [], [], []
    for row, document in enumerate(documents):
        column = 0  # of BOS
        for segment in document:
            column += len(encoder.ids(segment.text))
            if segment.shown_as:
                rows.append(row)
                columns.append(column)
                words.append([encoder.ids(f" {word}")[0] for word in segment.shown_as])
    if not rows:
        return hidden.new_zeros(())
    embedding = _unit_rms(model.get_input_embeddings().weight)
    logits = _unit_rms(hidden[rows, columns]) @ embedding.T / math.sqrt(hidden.shape[-1])
    return -F.log_softmax(logits, -1).gather(1, torch.tensor(words)).mean()


def train_llava(
    language: Path, world: tuple[Subject, ...], recipe: SeeingRecipe, finish: Callable[[LlamaForCausalLM], None]
) -> tuple[LlavaForConditionalGeneration, Tokenizer]:
    """Train all of a LLaVA.

    Returns:
        the model in bf16, and its tokenizer.
    """
    tokenizer = make_tokenizer(world)
    model = fresh_llava(language, tokenizer, recipe.seed)
    held_out = frozenset(scene for split in ("test", "validation") for scene, _ in held_out_questions(split))
    namer = PatchNamer(model, tokenizer)
    train_encoder(model, namer, recipe, held_out)
    train_whole(model, tokenizer, namer, world, recipe, held_out)
    for number in range(1, len(recipe.rounds)):  # with fresh random numbers, auxiliary heads and optimizer
        torch.manual_seed(recipe.seed + number)
        train_whole(model, tokenizer, PatchNamer(model, tokenizer), world, recipe, held_out, number)
    decoder = LlamaForCausalLM(model.config.text_config).float()
    decoder.model.load_state_dict(model.model.language_model.state_dict())
    finish(decoder)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    return model.bfloat16(), tokenizer  # measure the weights that are written
