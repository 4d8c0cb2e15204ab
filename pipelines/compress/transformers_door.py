"""The door of compression to Transformers. Import it only where it is used: it takes some seconds."""

from __future__ import annotations

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
