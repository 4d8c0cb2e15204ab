"""Tiny random checkpoints, a session that runs them with torch, and data sets in MMLU's schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.domain.progress import Progress
from pipelines.engines.port import Generation, SamplingParams

WORDS = ["river", "stone", "cloud", "maple", "tiger", "copper", "violin", "harbor", "lantern", "meadow", "falcon"]


class TorchSession:
    """The engine port on transformers: no cache, no sharing, one forward pass per pair."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[int] = []

    def __enter__(self) -> TorchSession:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def loglikelihood(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Progress
    ) -> list[tuple[float, bool]]:
        self.calls.append(len(pairs))
        with progress.task("scoring", total=len(pairs), unit="pairs") as advance:
            return [self._score(list(context), list(continuation), advance) for context, continuation in pairs]

    def _score(self, context: list[int], continuation: list[int], advance: Callable[[float], None]) -> Any:
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([context + continuation[:-1]])).logits[0, len(context) - 1 :]
        logprobs = torch.log_softmax(logits.float(), dim=-1)  # [tokens, vocabulary]
        advance(1)
        total = sum(float(logprobs[i, token]) for i, token in enumerate(continuation))
        return total, logprobs.argmax(-1).tolist() == continuation

    def generate(
        self, prompts: Sequence[Sequence[int]], limits: SamplingParams, progress: Progress
    ) -> list[Generation]:
        import torch

        made = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(limits.max_new_tokens):
                with torch.no_grad():
                    ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in limits.stop_token_ids:
                    ids.pop()
                    break
            made.append(Generation(ids[len(prompt) :], "length"))
        return made


def make_rows(subject: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows in the schema of cais/mmlu."""
    draw = random.Random(f"{subject}{seed}")
    return [
        {
            "question": f" What is the {draw.choice(WORDS)} of the {draw.choice(WORDS)} {number}?",
            "subject": subject,
            "choices": draw.sample(WORDS, 4),
            "answer": draw.randrange(4),
        }
        for number in range(count)
    ]


def write_tree(root: Path, subjects: Sequence[str], *, layout: str = "jsonl", dev: int = 5, test: int = 4) -> Path:
    """Write a data set as a jsonl tree or as the parquet files of a Hub snapshot."""
    for subject in subjects:
        folder = root / subject
        folder.mkdir(parents=True)
        for split, count, seed in (("dev", dev, 1), ("validation", 1, 2), ("test", test, 3)):
            rows = make_rows(subject, count, seed)
            if layout == "jsonl":
                (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                import pyarrow as pa
                import pyarrow.parquet as pq

                pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return root


@pytest.fixture
def tree() -> Callable[..., Path]:
    """`write_tree`, as a fixture, since test folders are not packages."""
    return write_tree


def _tokenizer(folder: Path, *, adds_bos: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([f"What is the {a} of the {b}?\nA. {b}\nAnswer: A" for a in WORDS for b in WORDS], trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def _model(family: str, vocab_size: int) -> Any:
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.6,  # far from uniform answers, so that the choices differ
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(7)
    if family == "gemma":
        return GemmaForCausalLM(GemmaConfig(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()


@pytest.fixture(scope="session", params=["llama", "gemma"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(model, tokenizer, folder): Gemma's tokenizer adds BOS by itself, this Llama's does not."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = _tokenizer(folder, adds_bos=request.param == "gemma")
    return _model(request.param, len(tokenizer)), tokenizer, folder


@pytest.fixture(scope="session")
def torch_session() -> type[TorchSession]:
    """The session class, to be given a torch model."""
    return TorchSession


class Recorder:
    """Keeps what was shown: title -> (total, unit, amount reached), and the notes."""

    def __init__(self) -> None:
        self.bars: dict[str, tuple[float | None, str, float]] = {}
        self.notes: list[str] = []

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Callable[[float], None]]:
        self.bars[title] = (total, unit, 0.0)

        def advance(amount: float) -> None:
            self.bars[title] = (total, unit, self.bars[title][2] + amount)

        yield advance

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def recorder() -> Recorder:
    """A `Progress` that remembers."""
    return Recorder()
