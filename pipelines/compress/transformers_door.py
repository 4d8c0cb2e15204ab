"""The door of compression to Transformers. Import it only where it is used: it takes some seconds."""

from __future__ import annotations

from pipelines.host.imports import TRANSFORMERS_TAKES_ALONG, without

with without(*TRANSFORMERS_TAKES_ALONG, asked_for_by="transformers"):
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DynamicCache,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging
    from transformers.utils.import_utils import is_datasets_available

    is_datasets_available()  # the answer is kept, for the Trainer

VERSION: str = transformers.__version__
MAJOR = int(VERSION.partition(".")[0])

__all__ = [
    "MAJOR",
    "VERSION",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "DynamicCache",
    "GenerationConfig",
    "PreTrainedTokenizerFast",
    "logging",
]
