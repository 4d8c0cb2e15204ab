"""Rows of a prompt table against Transformers' `inputs_embeds` and peft's prompt tuning, alone and in flight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino import prompt_table
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.prompt_table import PromptTable, TablePlaces
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence
from tests.contract.engines.conftest import LIMITS, Workshop, as_exported, relative_error
from tests.support.made_once import made_once
from tests.support.scheduled import answers, asked, scheduler
from tests.support.scored_logits import scored_logits

ROWS = 24
TEXT = [2, 388, 774, 15, 27]
NEW = 6


def with_table(workshop: Workshop, kind: str) -> Path:
    """Return an engine of a bundled model in float32 with a table of `ROWS` rows."""
    checkpoint = workshop.float32_checkpoint(kind)
    limits = replace(LIMITS, max_prompt_embedding_table_size=ROWS)
    return made_once(
        checkpoint.with_name(f"engine-table-{kind}"),
        lambda out: OpenVinoEngine().build(checkpoint, limits, out, SilentProgress()),
    )


def rows_of(model: Any, count: int, seed: int) -> np.ndarray:
    """Return random rows as large as embeddings of tokens are."""
    weights = model.get_input_embeddings().weight
    spread = float(weights.detach().float().std())
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, weights.shape[1])) * spread).astype(np.float32)


def prompt_of(model: Any, count: int, text: list[int] = TEXT) -> list[int]:
    """Return the first token of a text, all rows, and the other tokens."""
    vocab_size = model.config.vocab_size
    return [text[0], *range(vocab_size, vocab_size + count), *text[1:]]


def embeds(model: Any, prompt: list[int], rows: np.ndarray) -> torch.Tensor:
    """Return [1, T, H] of a prompt, as Transformers takes it."""
    ids = torch.tensor(prompt)
    of_table = ids >= model.config.vocab_size
    vectors = model.get_input_embeddings()(ids.masked_fill(of_table, 0)).detach().clone()
    vectors[of_table] = torch.from_numpy(rows)[ids[of_table] - model.config.vocab_size].to(vectors.dtype)
    return vectors[None]


def expected_tokens(model: Any, prompt: list[int], rows: np.ndarray) -> list[int]:
    """Return what Transformers generates greedily."""
    vectors = embeds(model, prompt, rows)
    found: list[int] = []
    with torch.no_grad():
        for _ in range(NEW):
            token = int(model(inputs_embeds=vectors).logits[0, -1].argmax())
            found.append(token)
            vectors = torch.cat([vectors, model.get_input_embeddings()(torch.tensor([[token]]))], 1)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_logits_are_those_of_inputs_embeds(workshop: Workshop, kind: str) -> None:
    model, folder = workshop.plain(kind, torch.float32), EngineFolder.load(with_table(workshop, kind))
    rows = rows_of(model, 10, 1)
    prompt = prompt_of(model, 10)
    stateful = StatefulModel(folder, OpenVinoOptions(inference_precision="f32", num_threads=1))
    (found,) = StatefulSequence(stateful, PromptTable(rows)).pieces(prompt, all_logits=True)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds(model, prompt, rows)).logits[0].numpy()
    assert relative_error(found, expected) < 1e-5


def test_rows_are_scaled_as_gemmas_embeddings_are(workshop: Workshop) -> None:
    """As in TensorRT-LLM; Transformers scales its embedding of tokens alone, so a row is divided by the square root."""
    model = as_exported(workshop.plain("gemma", torch.float32), "gemma")
    folder = EngineFolder.load(with_table(workshop, "gemma"))
    rows, prompt = rows_of(model, 10, 1), prompt_of(model, 10)
    stateful = StatefulModel(folder, OpenVinoOptions(inference_precision="f32", num_threads=1))
    given = PromptTable(rows / np.float32(model.config.hidden_size**0.5))
    (found,) = StatefulSequence(stateful, given).pieces(prompt, all_logits=True)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds(model, prompt, rows)).logits[0].numpy()
    assert relative_error(found, expected) < 1e-5


def test_adapters_and_drafts_cannot_read_a_table(workshop: Workshop) -> None:
    engine = with_table(workshop, "llama")
    with (
        pytest.raises(UserError, match="draft model or LoRA adapters cannot read"),
        scheduler(engine, draft_dir=engine),
    ):
        pass


def test_a_table_changes_no_text(workshop: Workshop) -> None:
    """Prompts without rows have the logits of an engine without a table, bit for bit."""
    checkpoint = workshop.float32_checkpoint("llama")
    with workshop.open(checkpoint) as session:
        expected = scored_logits(session, TEXT)
    options = OpenVinoOptions(inference_precision="f32", num_threads=1)
    with OpenVinoEngine(options).open(with_table(workshop, "llama")) as session:
        assert np.array_equal(scored_logits(session, TEXT), expected)


@pytest.fixture(scope="module")
def llama(workshop: Workshop) -> Any:
    return workshop.plain("llama", torch.float32)


def picture(model: Any, seed: int, count: int = 5, text: list[int] = TEXT, **values: Any) -> tuple[Any, list[int]]:
    """Return a request with rows of its own, and its expected tokens."""
    rows = rows_of(model, count, seed)
    prompt = prompt_of(model, count, text)
    return asked(prompt, NEW, table=PromptTable(rows), **values), expected_tokens(model, prompt, rows)


def test_requests_in_flight_keep_their_own_rows(workshop: Workshop, llama: Any) -> None:
    """The same ids name other rows in each request; the table holds those of four at once, so that the rest waits."""
    made = [picture(llama, seed) for seed in range(9)]
    text = asked(TEXT, NEW)
    with scheduler(with_table(workshop, "llama")) as running:
        alone = answers(running, [text])[0].tokens
        found = answers(running, [*(request for request, _ in made), text])
        again = answers(running, [made[0][0]])[0]
    assert [channel.tokens for channel in found] == [*(tokens for _, tokens in made), alone]
    assert again.tokens == made[0][1]


def test_the_first_rows_are_read_where_the_probe_of_the_table_has_been(workshop: Workshop, llama: Any) -> None:
    """At the start of a prompt, as a tuned prompt's are: the pipeline keeps the KV of the ids that the probe used."""
    rows = rows_of(llama, 4, 8)
    prompt = [*range(llama.config.vocab_size, llama.config.vocab_size + 4), *TEXT]
    with scheduler(with_table(workshop, "llama")) as running:
        (first,) = answers(running, [asked(prompt, NEW, table=PromptTable(rows))])
    assert first.tokens == expected_tokens(llama, prompt, rows)


def test_blocks_are_shared_by_content_alone(workshop: Workshop, llama: Any) -> None:
    """Two pictures with one question share nothing; the same picture shares its blocks, also from another request."""
    question = [2, *np.random.default_rng(3).integers(20, 900, 80).tolist()]
    first, second = (picture(llama, seed, text=question) for seed in (1, 2))
    with scheduler(with_table(workshop, "llama")) as running:
        runs = [answers(running, [request])[0] for request, _ in (first, second, first, second)]
        one_value = PromptTable(first[0].table.rows.copy())
        one_value.rows[-1, -1] += 1e-3
        other = answers(running, [replace(first[0], table=PromptTable(one_value.rows))])[0]
    assert [run.tokens for run in runs] == [first[1], second[1], first[1], second[1]]
    assert [run.kv.reused for run in runs] == [0, 0, 2, 2]
    assert other.kv.reused == 0


def test_rows_beside_the_pipeline(workshop: Workshop, llama: Any) -> None:
    """Requests for logits, a seed or a repetition penalty take their rows with them."""
    request, expected = picture(llama, 4, context_logits=True)
    penalized, _ = picture(llama, 4, repetition_penalty=1.3)
    with scheduler(with_table(workshop, "llama")) as running:
        plain, other = answers(running, [request, penalized])
    assert plain.tokens == expected
    assert len(other.tokens) == NEW


def test_prompt_tuning_as_peft_has_it(workshop: Workshop) -> None:
    """The tuned prompt of a task as rows before the text; each request names its task by bringing its rows."""
    peft = pytest.importorskip("peft")
    model = workshop.plain("llama", torch.float32)
    vocab_size = model.config.vocab_size
    torch.manual_seed(5)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    tuned = peft.get_peft_model(model, config)
    rows = tuned.prompt_encoder["default"].embedding.weight.detach().numpy()
    with torch.no_grad():
        expected = tuned(input_ids=torch.tensor([TEXT])).logits[0].numpy()
    folder = EngineFolder.load(with_table(workshop, "llama"))
    stateful = StatefulModel(folder, OpenVinoOptions(inference_precision="f32", num_threads=1))
    prompt = [*range(vocab_size, vocab_size + 8), *TEXT]
    (found,) = StatefulSequence(stateful, PromptTable(rows)).pieces(prompt, all_logits=True)
    assert relative_error(found, expected) < 1e-5
    with scheduler(with_table(workshop, "llama")) as running:
        answer = answers(running, [asked(prompt, 1, table=PromptTable(rows))])[0]
    assert answer.tokens == [int(expected[-1].argmax())]


def test_bf16_reads_the_table(workshop: Workshop, llama: Any) -> None:
    request, expected = picture(llama, 6)
    with scheduler(with_table(workshop, "llama"), inference_precision="bf16") as running:
        assert answers(running, [request])[0].tokens[:1] == expected[:1]


def test_a_table_that_is_not_read_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of OpenVINO that copies constants would answer of another picture."""
    monkeypatch.setattr(prompt_table, "_whole_mappings", lambda _file: iter(()))
    with (
        pytest.raises(UserError, match=r"does not read from the file.*max_prompt_embedding_table_size=0"),
        scheduler(with_table(workshop, "llama")),
    ):
        pass


def test_places_are_given_to_the_longest_unused() -> None:
    memory = np.zeros((4, 1), dtype=np.float32)
    places = TablePlaces(memory, 100)
    tables = [PromptTable(np.full((2, 1), value, dtype=np.float32)) for value in range(1, 4)]
    for table in tables[:2]:
        places.take(table)
    assert not places.fits(tables[2])
    first = places.ids(np.array([7, 100, 101]), tables[0])
    assert first[0] == 7
    assert memory[(first[1:] - 100) % 4].ravel().tolist() == [1, 1]
    places.release(tables[0])
    assert places.fits(tables[2])
    places.take(tables[2])
    places.release(tables[1])
    places.take(tables[0])
    again = places.ids(np.array([100, 101]), tables[0])
    assert memory[(again - 100) % 4].ravel().tolist() == [1, 1]
    assert not set(again.tolist()) & set(first.tolist())
