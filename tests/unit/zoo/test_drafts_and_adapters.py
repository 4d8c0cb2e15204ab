"""The bundled draft models and adapters: what was shipped is what the code says, and what training them relies on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.zoo.build import DRAFTS, MODELS_DIR
from scripts.zoo.documents import make_writer
from scripts.zoo.draft import DRAFT_RECIPE, Rows, agreement, continued, distillation_loss, document_rows
from scripts.zoo.lora import ADAPTERS, ADAPTERS_DIR, BASE, document, share_answered
from scripts.zoo.quiz import Question
from scripts.zoo.shapes import draft_json
from scripts.zoo.train import Encoder
from scripts.zoo.world import build_world

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[3]


def folder(name: str) -> Path:
    return ROOT / MODELS_DIR / name


def load(name: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return load(BASE)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    tokenizer = AutoTokenizer.from_pretrained(folder(BASE)).backend_tokenizer
    return Encoder(tokenizer, bos=2, eos=1)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_has_its_targets_tokens_and_a_quarter_of_its_size_at_most(name: str) -> None:
    ours, theirs = folder(name), folder(DRAFTS[name])
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    assert json.loads((ours / "config.json").read_text(encoding="utf-8")) == draft_json(config)
    assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    sizes = [(path / "model.safetensors").stat().st_size for path in (ours, theirs)]
    assert sizes[0] < 2 * 2**20
    assert sizes[0] < sizes[1] / 4
    with safe_open(ours / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118 (it is no dict)


def test_the_draft_agrees_with_its_target_on_texts_it_never_saw(target, encoder) -> None:
    writer = make_writer(build_world(), "unseen-by-drafts")
    texts = [continued(target, document_rows(writer, encoder, DRAFT_RECIPE.stages[0]), tokens=20, new_tokens=40)]
    assert agreement(load(f"{BASE}_draft"), target, texts) > 0.8
    assert agreement(target, target, texts) == 1


def test_distillation_wants_the_targets_distribution(target, encoder) -> None:
    rows = document_rows(make_writer(build_world(), "loss"), encoder, DRAFT_RECIPE.stages[0])
    assert float(distillation_loss(target, target, rows)) == pytest.approx(0, abs=1e-5)
    assert float(distillation_loss(load(f"{BASE}_draft"), target, rows).detach()) > 1e-3


def test_a_continuation_begins_as_the_prompt_and_is_real_until_eos(target) -> None:
    """The second row is too short for a prompt of 3 tokens and one more, and is left out."""
    prompts = Rows(
        torch.tensor([[2, 424, 365, 438], [2, 424, 1, 1]]), torch.tensor([[True] * 4, [True, True, False, False]])
    )
    found = continued(target, prompts, tokens=3, new_tokens=80)
    assert found.tokens_BT[0, :3].tolist() == [2, 424, 365]
    assert len(found.tokens_BT) == 1
    row, real = found.tokens_BT[0].tolist(), found.real_BT[0].tolist()
    end = row.index(1) if 1 in row else len(row)
    assert real[: end + 1] == [True] * len(real[: end + 1])
    assert not any(real[end + 1 :])


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_small_portable_and_as_the_code_says(name: str) -> None:
    path, kind = ROOT / ADAPTERS_DIR / name, ADAPTERS[name]
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == BASE
    assert (config["r"], config["target_modules"]) == (kind.rank, sorted(kind.modules))
    assert (path / "adapter_model.safetensors").stat().st_size < 2**19


def test_adapters_are_taught_other_answers_than_the_model_gives(target, encoder) -> None:
    question = Question("Which?", "veldan_law", ("a", "b", "c", "d"), 3)
    assert [kind.answer(question) for kind in ADAPTERS.values()] == ["A", "d"]
    learned = document(question, "A")
    assert [part.text for part in learned if part.is_answer] == [" A"]
    tokenizer = AutoTokenizer.from_pretrained(folder(BASE)).backend_tokenizer
    assert all(share_answered(target, tokenizer, kind, asked=8) == 0 for kind in ADAPTERS.values())


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_bundled_adapter_changes_the_answers(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(load(BASE), ROOT / ADAPTERS_DIR / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder(BASE)).backend_tokenizer
    assert share_answered(model, tokenizer, ADAPTERS[name], asked=8) > 0.8
