"""The tokenizer of an evaluation is opened without importing all that models need."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.adapter import load_tokenizer
from pipelines.domain.errors import UserError
from pipelines.settings.model import BUNDLED

MODEL = BUNDLED / "models" / "tiny_llama"


def changed(folder: Path, **entries: str) -> Path:
    """A copy of the bundled tokenizer, with other entries in tokenizer_config.json."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))
    return folder


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
