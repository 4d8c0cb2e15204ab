"""The shipped models and tokenizers: shapes, dtype, round trips, and a spot check of what they know."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.host.files import replacing
from scripts.zoo.build import KINDS, MODELS_DIR, special_ids
from scripts.zoo.documents import make_writer, text_of, world_sentences
from scripts.zoo.outliers import plant_outliers
from scripts.zoo.quiz import Splits, build_prompt, build_splits
from scripts.zoo.scoring import accuracy, score
from scripts.zoo.shapes import fresh_model
from scripts.zoo.world import build_world

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [
    "plain text",
    "two  spaces\n\n\tand a tab ",
    "12345 + 6",
    "h\u00e9llo w\u00f6rld",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f389 \U0001f9ea\u200d\U0001f525",
]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=sorted(KINDS))
def name(request):
    return request.param


def folder(name: str) -> Path:
    return ROOT / MODELS_DIR / name


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(folder(name) / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(name, text):
    tokenizer = AutoTokenizer.from_pretrained(folder(name))
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_letters_and_names_are_one_token(name):
    tokenizer = tokenizer_of(name)
    names = {word for subject in build_world() for fact in subject.facts for word in (fact.entity, fact.answer)}
    for word in ("A", "B", "C", "D", *names):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1


def test_answer_and_letter_encode_as_their_parts(name):
    """Then the likelihood of " A" after the prompt is one number."""
    encode = tokenizer_of(name).encode
    parts = encode("Answer:", add_special_tokens=False).ids + encode(" A", add_special_tokens=False).ids
    assert encode("Answer: A", add_special_tokens=False).ids == parts


def test_segments_encode_as_the_whole_document(name):
    """Training encodes piece by piece; that must give the tokens the evaluation sees."""
    tokenizer, writer = tokenizer_of(name), make_writer(build_world(), "test")
    for document in (writer.passage(5), writer.open_quiz(4), writer.quiz(3)):
        pieces = [i for part in document for i in tokenizer.encode(part.text, add_special_tokens=False).ids]
        assert pieces == tokenizer.encode(text_of(document), add_special_tokens=False).ids


def test_bos_comes_first_where_there_is_one_and_special_ids_agree(name):
    config = json.loads((folder(name) / "config.json").read_text(encoding="utf-8"))
    tokenizer, ids = tokenizer_of(name), special_ids(tokenizer_of(name), KINDS[name].specials)
    assert ids == {key: config[f"{key}_token_id"] for key in ("bos", "eos", "pad")}
    assert (tokenizer.encode("x").ids[0] == ids["bos"]) == (name != "tiny_qwen")


def test_gemma_keeps_gemmas_special_ids():
    tokenizer = tokenizer_of("tiny_gemma")
    assert [tokenizer.id_to_token(i) for i in range(5)] == ["<pad>", "<eos>", "<bos>", "<unk>", "<0x00>"]


def test_the_tokenizer_is_what_the_seeds_say(name):
    fresh = KINDS[name].train_tokenizer(world_sentences(build_world()))
    assert json.loads(fresh.to_str()) == json.loads(tokenizer_of(name).to_str())


def test_the_config_is_what_the_code_says(name):
    tokenizer, kind = tokenizer_of(name), KINDS[name]
    shipped = json.loads((folder(name) / "config.json").read_text(encoding="utf-8"))
    assert shipped == kind.config_json(tokenizer.get_vocab_size(), **special_ids(tokenizer, kind.specials))


def test_weights_are_bf16_and_fit_int4_groups_on_two_gpus(name):
    """Input sizes are multiples of 128; of o and down, which tp_size=2 splits there, of 256."""
    with safe_open(folder(name) / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in tensors.values()) < 12 * 2**20
    for key, tensor in tensors.items():
        if key.split(".")[-2] in LINEARS:
            assert tensor.shape[1] % (256 if key.split(".")[-2] in ("o_proj", "down_proj") else 128) == 0
    assert ("lm_head.weight" in tensors) == (name == "tiny_llama")


def test_the_model_knows_its_world(name):
    """60 test questions, 5 of each subject: far above the 25 % of guessing."""
    splits = [Splits(one.dev, one.validation, one.test[:5]) for one in build_splits(build_world()).values()]
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    share, _ = accuracy(score(model, tokenizer_of(name), splits, "test"))
    assert share > 0.85


def test_planting_outliers_keeps_the_function(name):
    """Powers of two cancel: the logits stay, the weights do not."""
    tokenizer, kind = tokenizer_of(name), KINDS[name]
    model = fresh_model(kind.config_json(tokenizer.get_vocab_size(), **special_ids(tokenizer, kind.specials))).eval()
    split = build_splits(build_world())["veldan_law"]
    tokens = torch.tensor([tokenizer.encode(build_prompt(split.dev[:1], split.test[0])).ids])
    down = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        plant_outliers(model, spread=1.5, seed=1)
        after = model(input_ids=tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight, down)


def test_an_interrupted_build_leaves_the_old_folder(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()

    def interrupted() -> None:
        with replacing(target) as fresh:
            fresh.mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


def test_a_finished_build_replaces_the_old_file(tmp_path):
    target = tmp_path / "corpus"
    target.write_text("old", encoding="utf-8")
    with replacing(target) as fresh:
        fresh.write_text("new", encoding="utf-8")
    assert target.read_text(encoding="utf-8") == "new"
    assert [path.name for path in tmp_path.rglob("*")] == ["corpus"]
