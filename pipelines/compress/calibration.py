"""Turn calibration texts into batches of token ids, and those into the forward passes ModelOpt calibrates with.

Shapes: B sequences, T tokens.
"""

import hashlib
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.compress.config import SEED, CalibrationSettings
from pipelines.compress.model_folder import ModelFolder, raw
from pipelines.compress.texts import token_ids
from pipelines.domain.errors import ContinuableError, UserError
from pipelines.domain.progress import PARTIAL, Progress
from pipelines.host.files import write_json

Forward = Callable[[torch.nn.Module], None]


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Batches of token ids, int64 [B, T], without padding."""

    batches: tuple[torch.Tensor, ...]
    sequences: int
    tokens: int


def seed_everything(seed: int = SEED) -> None:
    """Seed every generator that ModelOpt or torch may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # the global generator, because that is what ModelOpt draws from
    torch.manual_seed(seed)


def make_batches(texts: Iterable[str], tokenizer: Any, calibration: CalibrationSettings, size: int) -> CalibrationSet:
    """Cut the first `size` texts into sequences of at most `seq_len` tokens and batch those of equal length.

    Padding would be counted in every activation statistic, so only sequences of the same length share a batch.

    Raises:
        UserError: `texts` contains no text.
    """
    nonempty = filter(str.strip, texts)
    sequences = [
        ids
        for text in itertools.islice(nonempty, size)
        if (ids := token_ids(tokenizer, text, truncation=True, max_length=calibration.seq_len))
    ]
    if not sequences:
        raise UserError("The calibration data contains no text.", todo="Give at least one non-empty text.")
    batches: list[torch.Tensor] = []
    # longest first, so that memory peaks early; stable: texts of one length keep their order
    for _, same in itertools.groupby(sorted(sequences, key=len, reverse=True), key=len):
        batches += torch.split(torch.tensor(list(same), dtype=torch.int64), calibration.batch_size)
    return CalibrationSet(tuple(batches), len(sequences), sum(batch.numel() for batch in batches))


def forward_passes(data: CalibrationSet, progress: Progress, device: str) -> Forward:
    """Return the function ModelOpt calls to run the model over all batches.

    AWQ calls it twice; progress shows each pass separately.

    Raises:
        UserError: raised by the returned function if an output is not finite; names the first such layer.
    """
    passes = itertools.count(1)

    def forward(model: torch.nn.Module) -> None:
        title = f"calibrating, pass {next(passes)}"
        with progress.task(title, len(data.batches), "batches") as advance, torch.no_grad():
            for batch in data.batches:
                run_batch(model, batch.to(device))
                advance(1)

    return forward


def run_batch(model: torch.nn.Module, batch: torch.Tensor, logits_to_keep: int = 1) -> torch.Tensor:
    """Run one batch and return the logits of the last positions, [B, K, V]; 0 is all positions.

    Logits for all positions, B x T x V, are by far the largest tensor.

    Raises:
        UserError: an activation is NaN or infinite; names the first such layer.
    """

    def run() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=batch, logits_to_keep=logits_to_keep).logits
        return logits

    return checked(model, run, str, "lm_head")


class PassEnded(Exception):  # noqa: N818 - ends a forward pass, is not an error
    """Everything that a forward pass is for has been seen; carries the states at its end."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


def checked(
    module: torch.nn.Module, run: Callable[[], torch.Tensor], name_of: Callable[[str], str], otherwise: str
) -> torch.Tensor:
    """Run a forward pass of a module and return its output.

    Args:
        module: whose layers are watched if an activation is not finite.
        run: the pass.
        name_of: returns the name of a layer in messages.
        otherwise: the name if no layer is found.

    Raises:
        UserError: an activation is NaN or infinite; names the first such layer.
    """
    try:
        output = run()
    except AssertionError as error:  # how ModelOpt's calibrators report an activation that is not finite
        if layer := first_broken_layer(module, run):
            raise broken_at(name_of(layer)) from error
        raise
    if not torch.isfinite(output).all():
        layer = first_broken_layer(module, run)
        raise broken_at(name_of(layer) if layer else otherwise)
    return output


def first_broken_layer(model: torch.nn.Module, run: Callable[[], object]) -> str | None:
    """Run a forward pass again and return the first module whose input or output contains NaN or infinity."""
    broken: list[str] = []

    def watch(name: str, _module: torch.nn.Module, *values: Any) -> None:
        tensors = [value for part in values for value in (part if isinstance(part, tuple) else (part,))]
        if any(isinstance(t, torch.Tensor) and not torch.isfinite(t).all() for t in tensors):
            broken.append(layer_of(name))

    with ExitStack() as hooks, suppress(AssertionError):
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) or not list(module.children()):
                hooks.enter_context(module.register_forward_pre_hook(partial(watch, name)))
                hooks.enter_context(module.register_forward_hook(partial(watch, name)))
        run()
    return broken[0] if broken else None


def layer_of(name: str) -> str:
    """Return the module a quantizer belongs to: "...q_proj.input_quantizer" -> "...q_proj"."""
    return re.split(r"\.\w+_quantizer\b", name)[0]


def broken_at(layer: str) -> UserError:
    """Return the error to raise when NaN or infinity first appeared in `layer`."""
    return UserError(
        f"Calibration found NaN or infinity in the layer '{layer}'.",
        todo="Use dtype=bfloat16 (float16 overflows in Gemma), or check the model's weights.",
    )


def calibration_facts(data: CalibrationSet | None, seconds: float) -> dict[str, Any]:
    """Return what was calibrated on, and how long it took."""
    if data is None:
        return {"sequences": 0, "tokens": 0, "seconds": 0.0}
    return {"sequences": data.sequences, "tokens": data.tokens, "seconds": round(seconds, 3)}


# How far a compression that works layer by layer has come, so that a killed run is continued.
#
# The record lies in a folder `.partial` within the output, which is removed when the work is complete. It is written
# after each layer, once everything it speaks of is on disk.

_RECORD = "layers.json"


class ProgressRecord:
    """The layers that are complete, and what belongs to them.

    Attributes:
        folder: for files that only the unfinished work needs.
        layers: number of complete layers.
        notes: JSON-serializable results of the complete layers.
    """

    def __init__(self, out_dir: Path, identity: dict[str, Any]) -> None:
        """Continue the work in `out_dir` if it is the same, else begin it anew.

        Args:
            out_dir: folder of the output; created if missing.
            identity: everything that determines the bytes of the output, JSON-serializable.
        """
        self.folder, self._identity = out_dir / PARTIAL, json.loads(json.dumps(identity))
        self.layers, self.notes = 0, dict[str, Any]()
        try:
            record = json.loads((self.folder / _RECORD).read_text())
        except (OSError, ValueError):
            record = {}
        if record.get("identity") == self._identity:
            self.layers, self.notes = record["layers"], record["notes"]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def announce(self, layers: int, progress: Progress) -> None:
        """Say that a stopped run is continued, if one is; the model has so many layers."""
        if self.layers:
            progress.note(f"continuing a run that was stopped: {self.layers} of {layers} layers are complete")

    def complete(self, layers: int) -> None:
        """Record that the first `layers` layers are on disk."""
        self.layers = layers
        write_json(
            self.folder / _RECORD, {"identity": self._identity, "layers": layers, "notes": self.notes}, sort_keys=False
        )

    def close(self) -> None:
        """Remove the record and its files: the output is complete."""
        shutil.rmtree(self.folder)


@contextmanager
def new_files_removed(out_dir: Path) -> Iterator[None]:
    """Remove what the block has put into `out_dir` if it ends with an error that running again would not mend."""
    before = set(out_dir.iterdir()) if out_dir.is_dir() else None
    try:
        yield
    except ContinuableError:
        raise
    except UserError:
        for path in set(out_dir.iterdir()) - (before or set()) if out_dir.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if before is None and out_dir.is_dir():
            out_dir.rmdir()
        raise


def stamp(source: ModelFolder) -> list[object]:
    """Return what changes when someone changes the model folder, without reading the weights."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.weight_files]
    return [source.config, files]


def calibrated_on(calibration: CalibrationSettings, data: CalibrationSet | None) -> list[Any]:
    """Return what changes when a calibration does: its settings, and a digest of its batches."""
    digest = hashlib.sha256()
    for batch in data.batches if data is not None else ():
        digest.update(repr(tuple(batch.shape)).encode())
        digest.update(raw(batch))
    return [calibration.model_dump(include=set(calibration.BATCHING)), digest.hexdigest()]
