"""Tiny random models in Hugging Face folders: Llama with grouped KV heads, a tied one, Gemma with one KV head."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt")
transformers = pytest.importorskip("transformers")

from pipelines.compress.config import CalibrationSettings  # noqa: E402
from pipelines.compress.specs import QuantSpec  # noqa: E402
from pipelines.domain.formats import FORMATS, KvFormat, QFormat  # noqa: E402
from tests.support.specs import quant_spec  # noqa: E402

SIZES = {
    "vocab_size": 200,  # not a multiple of 64, which is where exporters pad
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
CALIBRATION = CalibrationSettings(size=4, seq_len=24, batch_size=2)


def spec_of(qformat: QFormat, kv_cache: KvFormat = KvFormat.AUTO, **settings: Any) -> QuantSpec:
    """Return a format for these models, whose widths are no multiples of 128; AWQ tries 5 strengths in place of 11."""
    step = 0.25 if FORMATS[qformat].tuning == "awq" else None
    return quant_spec(qformat, kv_cache, group_size=64, awq_alpha_step=step, **settings)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(199)} | {"<unk>": 199}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, kind: str, **changes: object) -> Path:
    """Write a seeded random model; `kind` is llama, tied or gemma."""
    if kind == "gemma":
        # head_dim is not hidden / heads, as in Gemma 2B
        config = transformers.GemmaConfig(**(SIZES | {"num_key_value_heads": 1, "head_dim": 64} | changes))
    else:
        extra = {"num_key_value_heads": 2, "rope_theta": 500000.0, "tie_word_embeddings": kind == "tied"}
        config = transformers.LlamaConfig(**(SIZES | extra | changes))
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the three models, by kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root / kind, kind) for kind in ("llama", "tied", "gemma")}


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Twelve texts of 12 to 40 words."""
    draw = random.Random(3)
    return [" ".join(f"w{draw.randrange(199)}" for _ in range(draw.randrange(12, 40))) for _ in range(12)]
