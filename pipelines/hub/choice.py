"""Choose the files to download: safetensors, configuration and tokenizer, never anything that can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.hub.source import HubListing

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer needs one of these; the other files only describe it."""
SMALL_PATTERNS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)
DATA_PATTERNS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt")
RUNNABLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py", ".h5", ".msgpack", ".joblib")
"""Pickles and other formats that can run code when loaded."""


def check_model(listing: HubListing) -> None:
    """Reject a repository that cannot be a usable model, before anything is fetched.

    Raises:
        UserError: no config.json, no safetensors weights, or no tokenizer; lists everything that is missing.
    """
    names, faults = listing.files, []
    if CONFIG not in names:
        faults.append(Fault(f"{listing.place} has no {CONFIG}.", todo="Give a Hugging Face Transformers model."))
    if INDEX not in names and WEIGHTS not in names:
        faults.append(_no_weights(listing))
    if not any(name in names for name in TOKENIZERS):
        known = ", ".join(TOKENIZERS)
        faults.append(Fault(f"{listing.place} has no tokenizer.", f"One of {known} is needed."))
    if faults:
        raise UserError.of(faults)


def check_shape(found: ModelShape, expected: ModelShape, listing: HubListing) -> None:
    """Compare the repository's model with the configured one.

    Raises:
        UserError: fields differ; the message names each.
    """
    faults = [
        Fault(
            f"{CONFIG} of {listing.place} has {name}={getattr(found, name)}, "
            f"but the configuration expects {getattr(expected, name)}.",
            todo="Correct the model's configuration, or choose the repository it describes.",
        )
        for name in expected.differences(found)
    ]
    if faults:
        raise UserError.of(faults)


def model_files(listing: HubListing, index: Mapping[str, Any] | None) -> list[str]:
    """List the files that make up the model.

    Args:
        listing: files of the repository.
        index: content of model.safetensors.index.json, if the repository has one; it names the shards.

    Raises:
        UserError: shards named by the index are missing.
    """
    small = [name for name in listing.files if any(fnmatch(name, pattern) for pattern in SMALL_PATTERNS)]
    small = [name for name in small if "/" not in name]  # * also matches "/", and subfolders hold other models
    if index is None:
        return [*small, WEIGHTS]
    shards = _shards(listing, index)
    missing = [name for name in shards if name not in listing.files]
    if missing:
        raise UserError(
            f"{INDEX} of {listing.place} names {len(missing)} of {len(shards)} shards that are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
            todo="Unset HF_HUB_OFFLINE once to fetch them."
            if listing.offline
            else "Choose another revision: this upload is incomplete.",
        )
    return [*small, INDEX, *shards]


def dataset_files(listing: HubListing, patterns: Sequence[str] | None) -> list[str]:
    """List the data files that match, without any that can run code.

    Raises:
        UserError: nothing matches.
    """
    wanted = patterns or DATA_PATTERNS
    found = [
        name
        for name in listing.files
        if any(fnmatch(name, pattern) for pattern in wanted) and not name.endswith(RUNNABLE)
    ]
    if not found:
        raise UserError(
            f"{listing.place} has no data file that matches {', '.join(wanted)}.",
            allowed=f"It has {_some(list(listing.files))}; {', '.join(RUNNABLE)} are never read.",
            todo="Choose a data set stored as Parquet, JSON, CSV or text.",
        )
    return found


def _shards(listing: HubListing, index: Mapping[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{INDEX} of {listing.place} has no weight_map, so it names no shards.")
    shards = sorted({str(name) for name in weight_map.values()})
    if not all(name.endswith(".safetensors") for name in shards):
        raise UserError(
            f"{INDEX} of {listing.place} names {shards[0]}.",
            allowed="Only safetensors are read.",
        )
    return shards


def _no_weights(listing: HubListing) -> Fault:
    pickles = [name for name in listing.files if name.endswith(RUNNABLE)]
    if pickles:
        return Fault(
            f"{listing.place} has only pickled weights ({_some(pickles)}), which can run code when loaded.",
            "Only safetensors are read.",
            "Choose a repository or revision with model.safetensors, or convert it with save_pretrained().",
        )
    return Fault(
        f"{listing.place} has neither {WEIGHTS} nor {INDEX}.",
        f"It has {_some(list(listing.files))}.",
        "Choose a repository with a complete model in Transformers' layout.",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "no files"
