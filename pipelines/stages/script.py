"""Script: run one of TensorRT-LLM's own example scripts, as its guide says, and check what it wrote."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.host.lifetimes import run_logged
from pipelines.settings.features import MultimodalSettings, SpeculativeSettings

LOG = "script.log"
HEADS_OPTION = {"medusa": "--medusa_model_dir", "redrafter": "--drafter_model_dir", "eagle": "--eagle_model_dir"}
MODEL_OPTION = {"medusa": "--model_dir", "redrafter": "--base_model_checkpoint_dir", "eagle": "--model_dir"}
"""Where the script takes the model from: a Hugging Face folder, or for ReDrafter a TensorRT-LLM checkpoint."""
ARCHITECTURE = {"medusa": "MedusaForCausalLM", "redrafter": "ReDrafterForLLaMALM", "eagle": "EagleForCausalLM"}
HEADS_DTYPE: Literal["float16"] = "float16"


@dataclass(frozen=True)
class Script:
    """Folders in, the output of a script out.

    Attributes:
        name: of the stage: "convert" or "vision".
        writes: what its output is.
        script: path below the examples folder of TensorRT-LLM 1.2.
        examples: that folder.
        options: of the script, without paths.
        places: option -> input whose folder it takes.
        architecture: of the checkpoint that the script writes; None if it writes none.
    """

    name: str
    writes: str
    script: str
    examples: Path
    options: tuple[str, ...]
    places: tuple[tuple[str, str], ...]
    architecture: str | None = None
    ranks: int = 1
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ("tensorrt-llm",)
    needs: tuple[str, ...] = ()  # TensorRT-LLM is checked by rules, so that any machine can plan

    def identity(self) -> dict[str, Any]:
        """Return the script and its options."""
        return {"script": self.script, "options": list(self.options)}

    def command(self, places: Mapping[str, str], out_dir: str) -> list[tuple[str, ...]]:
        """Return the command in parts, one option each."""
        options = [tuple(option.split("=", 1)) for option in self.options]
        folders = [(option, places[name]) for option, name in self.places]
        return [("python3", str(self.examples / self.script)), *folders, ("--output_dir", out_dir), *options]

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return str(facts["script"])

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Run the script and check its output against the request.

        Raises:
            UserError: the script is missing or failed, or wrote something else.
        """
        program = self.examples / self.script
        if not program.is_file():
            raise UserError(
                f"paths.trtllm_examples='{self.examples}' has no {self.script}.",
                allowed="It must be the examples folder of TensorRT-LLM's branch release/1.2.",
                todo="Run inside NVIDIA's container (make shell), or give the folder of a checkout.",
            )
        parts = self.command({name: str(path) for name, path in inputs.items()}, str(out_dir))
        command = [sys.executable, *[word for part in parts for word in part][1:]]
        out_dir.mkdir(parents=True, exist_ok=True)
        with progress.task(self.script, None):
            run_logged(command, title=self.script, env=dict(os.environ), cwd=out_dir, log_file=out_dir / LOG)
        if self.architecture is not None:
            self._read_back(out_dir)
        return {"script": self.script, "options": list(self.options)}

    def _read_back(self, out_dir: Path) -> None:
        config = out_dir / "config.json"
        architecture = json.loads(config.read_text()).get("architecture") if config.is_file() else None
        missing = [rank for rank in range(self.ranks) if not (out_dir / f"rank{rank}.safetensors").is_file()]
        if architecture != self.architecture or missing:
            raise UserError(
                f"{self.script} wrote architecture={architecture}, and ranks {missing} are missing.",
                allowed=f"Expected {self.architecture} with {self.ranks} rank(s).",
                todo="This TensorRT-LLM differs from 1.2: use the container's own version.",
            )


def convert_heads(guess: SpeculativeSettings, tp_size: int, examples: Path) -> Script:
    """Make the stage that converts a model and its trained heads to one 16-bit TensorRT-LLM checkpoint.

    Its input `model` is the Hugging Face folder, or for ReDrafter the model's own checkpoint in the same type.

    Source: examples/{medusa@063e02f,redrafter@0e8b948,eagle@04a2cac}/convert_checkpoint.py of TensorRT-LLM.
    """
    own = {
        "medusa": (
            f"--num_medusa_heads={guess.num_heads}",
            f"--num_medusa_layers={guess.num_layers}",
            f"--max_medusa_token_len={guess.num_draft_tokens}",
        ),
        "redrafter": (
            f"--redrafter_num_beams={guess.num_beams}",
            f"--redrafter_draft_len_per_beam={guess.draft_len_per_beam}",
        ),
        "eagle": (f"--max_draft_len={guess.num_draft_tokens}", f"--num_eagle_layers={guess.num_layers}"),
    }[guess.mode]
    return Script(
        name="convert",
        writes="checkpoint",
        script=f"{guess.mode}/convert_checkpoint.py",
        examples=examples,
        options=(f"--dtype={HEADS_DTYPE}", f"--tp_size={tp_size}", f"--workers={tp_size}", *own),
        places=((MODEL_OPTION[guess.mode], "model"), (HEADS_OPTION[guess.mode], "heads")),
        architecture=ARCHITECTURE[guess.mode],
        ranks=tp_size,
    )


def build_vision(images: MultimodalSettings, batch: int, examples: Path) -> Script:
    """Make the stage that builds the engine of a model's vision encoder.

    Source: examples/models/core/multimodal/README.md@89fd9b7 of TensorRT-LLM.
    """
    return Script(
        name="vision",
        writes="vision_engine",
        script="models/core/multimodal/build_multimodal_engine.py",
        examples=examples,
        options=(f"--model_type={images.model_type}", f"--max_batch_size={batch}"),
        places=(("--model_path", "vision"),),
    )
