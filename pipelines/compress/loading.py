"""Load a Hugging Face folder as torch model and tokenizer: local files and safetensors only, no remote code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.tokenizer import opened
from pipelines.compress.contexts import gpu_memory_named, muted
from pipelines.compress.model_folder import ModelFolder, look_at, pick_device, torch_dtype
from pipelines.compress.transformers_door import (
    MAJOR,
    VERSION,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from pipelines.domain.errors import UserError
from pipelines.domain.families import SOFT_CAPS, settled
from pipelines.domain.progress import Progress
from pipelines.domain.rotary import both_spellings


def load_model(source: ModelFolder, dtype: str, device: str) -> torch.nn.Module:
    """Load the weights in `dtype` straight from the safetensors files, ready for inference.

    Raises:
        UserError: a weight is missing or not finite.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(source.folder),
        config=hf_config(source),
        dtype=torch_dtype(dtype),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{source.folder} lacks the tensor '{missing[0]}' ({len(missing)} missing).",
            todo="Download the model again.",
        )
    for name, weight in model.named_parameters():
        # NaN and infinity both show up in the minimum or maximum, which need no copy of the tensor
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(weight.detach())):
            raise UserError(
                f"The weight '{name}' of {source.folder} contains NaN or infinity.",
                todo="Download or train the model again; such a model cannot be calibrated.",
            )
    model.config.use_cache = False
    ready: torch.nn.Module = model.to(device).eval().requires_grad_(False)
    return ready


def load_tokenizer(source: ModelFolder) -> Any:
    """Load the folder's tokenizer: tokenizer.json, whatever class is named, which gives the same ids everywhere.

    Raises:
        UserError: the folder has no tokenizer, or it cannot be read.
    """
    return PreTrainedTokenizerFast(**opened(source.folder).for_transformers())


def hf_config(source: ModelFolder) -> Any:
    """Return Transformers' configuration, with RoPE read correctly whichever version wrote the file.

    Transformers 5 writes `rope_parameters`; 4.x only reads `rope_theta` and `rope_scaling` beside it, and would
    silently fall back to theta 10,000.

    Raises:
        UserError: Transformers refuses config.json, for example a whole number where it wants a float.
    """
    try:
        config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - of a class that depends on the versions of Transformers and its libraries
        raise UserError(
            f"Transformers {VERSION} refuses {source.folder / 'config.json'}: {' '.join(str(error).split())}.",
            todo="Correct the file.",
        ) from None
    if MAJOR < 5:
        rope = both_spellings(settled(source.config))
        for key in rope.keys() - {"rope_parameters"}:
            setattr(config, key, rope[key])
    if getattr(config, SOFT_CAPS[0], None) is not None:
        config._attn_implementation = "eager"  # sdpa, the default before 5.24, leaves the cap out without a word
    return config


# A model as Transformers itself computes it, in float32: the reference for everything that is made from it.

IN_FLOAT32, OTHERWISE = "the model in float32", "set eval.baseline=build"
TOKENS_AT_ONCE = 4096
"""Tokens of the sequences that are computed together, unless a single one is longer."""


class ReferenceModel:
    """A Hugging Face model that scores continuations.

    The weights are those on disk and the arithmetic is float32, so nothing is rounded that the model's author did not
    round. Sequences of equal length are computed together, so that none needs padding.
    """

    def __init__(self, model_dir: Path, device: str) -> None:
        """Load the model.

        Raises:
            UserError: the folder is not a readable model, or the device does not exist.
        """
        source = look_at(model_dir)
        self.max_position_embeddings = source.shape.max_position_embeddings
        self._device = pick_device(device)
        with muted(), gpu_memory_named(IN_FLOAT32, OTHERWISE):
            self._model = load_model(source, "float32", self._device)

    def loglikelihood(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], progress: Progress
    ) -> list[tuple[float, bool]]:
        """Score continuations; see `pipelines.engines.port.ScoringSession`."""
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        by_length: dict[int, dict[tuple[int, ...], list[int]]] = {}  # the input, and the positions of its pairs
        for position, (context, continuation) in enumerate(pairs):
            fed = (*context, *continuation[:-1])  # the last token is only predicted
            by_length.setdefault(len(fed), {}).setdefault(fed, []).append(position)
        with progress.task("scoring with Transformers", total=len(pairs), unit="pairs") as advance:
            for length, sequences in sorted(by_length.items()):
                together = max(1, TOKENS_AT_ONCE // length)
                distinct = list(sequences)
                for start in range(0, len(distinct), together):
                    batch = distinct[start : start + together]
                    scored = [sequences[sequence] for sequence in batch]
                    keep = max(len(pairs[position][1]) for positions in scored for position in positions)
                    with torch.inference_mode(), gpu_memory_named(IN_FLOAT32, OTHERWISE):
                        logits = self._model(torch.tensor(batch, device=self._device), logits_to_keep=keep).logits
                    rows = torch.log_softmax(logits, dim=-1).cpu()  # after the last `keep` tokens of each sequence
                    for row, positions in zip(rows, scored, strict=True):
                        for position in positions:
                            scores[position] = _score(row, pairs[position][1])
                        advance(len(positions))
        return scores


def _score(log_probabilities: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the summed log probability of a continuation, and whether it is what greedy decoding would produce."""
    last = log_probabilities[-len(continuation) :]
    tokens = torch.tensor(continuation)
    return float(last.gather(1, tokens[:, None]).sum()), bool((last.argmax(-1) == tokens).all())
