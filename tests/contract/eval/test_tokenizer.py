"""The tokenizer of an evaluation is the one that AutoTokenizer would choose, without importing all that models need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eval.adapter import load_tokenizer
from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_llama"
TEXTS = ["The capital of Feltex is", "  two spaces", "naïve 数学 \U0001f600", "<|begin_of_text|>special"]


def changed(folder: Path, **entries: str) -> Path:
    """A copy of the bundled tokenizer, with other entries in tokenizer_config.json."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    return folder


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_general_class_is_what_auto_chooses(architecture: str, tmp_path: Path) -> None:
    """For every family, Qwen 2's own class included: the same class, special tokens, ids and texts."""
    folder = changed(tmp_path / "model")
    kind = next(kind for kind, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if each == architecture)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    ours, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(auto)
    assert ours.special_tokens_map == auto.special_tokens_map
    assert [ours.encode(text) for text in TEXTS] == [auto.encode(text) for text in TEXTS]
    assert [ours.decode(ours.encode(text)) for text in TEXTS] == [auto.decode(auto.encode(text)) for text in TEXTS]


def test_a_class_of_its_own_is_left_to_auto(tmp_path: Path) -> None:
    """Gemma's own class adds BOS by itself, whatever tokenizer.json does."""
    folder = changed(tmp_path / "model", tokenizer_class="GemmaTokenizer")
    assert type(load_tokenizer(folder)) is type(AutoTokenizer.from_pretrained(str(folder)))


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    with pytest.raises(UserError, match=rf"^{folder}/tokenizer_config\.json is not valid JSON: Expecting value"):
        load_tokenizer(folder)


def test_models_are_not_imported() -> None:
    """What models and their generation need takes three seconds of processor time."""
    code = f"""
import sys
from pathlib import Path
from eval.adapter import load_tokenizer
assert load_tokenizer(Path({str(MODEL)!r})).encode("a")
found = [name for name in ("transformers.generation", "torch._dynamo", "sklearn") if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
