"""Write the files of an emulated engine; rankN.engine contains text."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.emulated_trtllm.talk import version


def write_config(folder: Path, pretrained: dict[str, Any], built: dict[str, Any]) -> None:
    """Write config.json with the keys of `EngineConfig.to_dict`, and the mark `emulated`."""
    whole = {"version": version(), "pretrained_config": pretrained, "build_config": built, "emulated": True}
    (folder / "config.json").write_text(json.dumps(whole, indent=4))


def write_rank(folder: Path, rank: int, checkpoint: Path) -> None:
    """Write one engine file that depends on the rank's weights."""
    digest = hashlib.sha256((checkpoint / f"rank{rank}.safetensors").read_bytes()).hexdigest()
    (folder / f"rank{rank}.engine").write_text(f"emulated engine of rank {rank}, weights {digest}\n")
