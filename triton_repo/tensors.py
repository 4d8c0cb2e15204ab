"""The tensors of every model in the repository, once: name, type, shape, whether a request may leave them out.

Clients work because they are those of the templates of `triton_backend/all_models/{inflight_batcher_llm,llmapi,
multimodal}` (TensorRT-LLM 1.2), as `template_tensors.json` has them. Shapes exclude the batch dimension; -1 is any
length. Two remarks on the source: its ensemble declares `kv_cache_alloc_total_blocks` twice, here it is declared once;
`min_length`, which genai-perf sends for a fixed output length, is not an input there nor here
(`--extra-inputs min_tokens:N` does the same).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGITS, TABLE = "LOGITS", "prompt_embedding_table"
"""Stand for the engine's own types of logits and of a prompt table, which its backend does not convert."""
TYPES = {
    "${logits_datatype}": LOGITS,
    "${encoder_input_features_data_type}": "FP16",
}
"""Placeholder of the templates -> the type."""

PREPROCESSING, TENSORRT_LLM, POSTPROCESSING = "preprocessing", "tensorrt_llm", "postprocessing"
ENSEMBLE, BLS = "ensemble", "tensorrt_llm_bls"
DRAFT = "tensorrt_llm_draft"
"""A second `tensorrt_llm` with an engine of its own."""
ENCODERS = "multimodal_encoders"
"""The vision model before a language model."""
LLMAPI = "llmapi_tensorrt_llm"
"""Not a model's name: the tensors of `tensorrt_llm` in the llmapi flavour."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output.

    Attributes:
        name: as clients spell it.
        dtype: Triton's type without "TYPE_", LOGITS or TABLE.
        dims: shape without the batch dimension.
        optional: a request may leave it out.
        ragged: requests of one batch may differ in it; Triton then hands them over side by side, never padded.
        scalar: clients send [1], the model sees no dimension.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """Inputs and outputs of one model."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def _tensors(rows: Iterable[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    read = (
        Tensor(
            row["name"],
            # the templates of the ensemble and the vision model have FP16, which is right for such engines only
            TABLE
            if row["name"].lower().endswith(TABLE)
            else TYPES.get(row["dtype"], row["dtype"].removeprefix("TYPE_")),
            tuple(row["dims"]),
            optional=row["optional"],
            ragged=row.get("allow_ragged_batch", False),
            scalar="reshape" in row,
        )
        for row in rows
    )
    return tuple(dict.fromkeys(read))


INTERFACES = {
    model: ModelInterface(_tensors(rows["inputs"]), _tensors(rows["outputs"]))
    for model, rows in json.loads(Path(__file__).with_name("template_tensors.json").read_text(encoding="utf-8")).items()
    if model in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, BLS, LLMAPI, ENCODERS)
}

OWN = {
    PREPROCESSING: ModelInterface(inputs=(), outputs=(Tensor("CANCELLATION_KEY", "UINT64", (1,)),)),
    TENSORRT_LLM: ModelInterface(
        inputs=(
            Tensor("cancellation_key", "UINT64", (1,), optional=True),
            Tensor("return_top_log_probs", "INT32", (1,), optional=True),
            Tensor("return_context_log_probs", "INT32", (1,), optional=True),
        ),
        outputs=(
            Tensor("cancellation_key", "UINT64", (2,)),
            Tensor("top_token_ids", "INT32", (-1, -1)),
            Tensor("top_log_probs", "FP32", (-1, -1)),
            Tensor("context_log_probs", "FP32", (-1,)),
            Tensor("context_top_token_ids", "INT32", (-1, -1)),
            Tensor("context_top_log_probs", "FP32", (-1, -1)),
        ),
    ),
    POSTPROCESSING: ModelInterface(inputs=(Tensor("CANCELLATION_KEY", "UINT64", (2,), optional=True),), outputs=()),
}
"""What the models have beside the template's tensors where `tensorrt_llm` is ours.

The keys are described at `generate.CANCELLATION`. The log probabilities are those of the prompt's own tokens after the
first, and of as many likeliest tokens as the input says: after each token of the prompt, or at the place of each new
one. The template has the logits of the whole vocabulary alone, 608 KB a token where that has 152,000 entries.
"""


def interface(name: str, *, ours: bool = False) -> ModelInterface:
    """Return the tensors of a model.

    Args:
        name: of the model, or LLMAPI.
        ours: whether the repository's `tensorrt_llm` is this project's own Python model.

    Raises:
        KeyError: there is no such model.
    """
    theirs, more = INTERFACES[name], OWN.get(name) if ours else None
    if more is None:
        return theirs
    return ModelInterface(theirs.inputs + more.inputs, theirs.outputs + more.outputs)
