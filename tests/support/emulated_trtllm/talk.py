"""Lines as TensorRT-LLM's logger writes them."""

from __future__ import annotations

import sys
import time
from importlib import metadata


def version() -> str:
    """Of the emulated package."""
    return metadata.version("tensorrt_llm")


def say(text: str) -> None:
    """One line as it is."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def info(text: str, tool: str = "TRT-LLM") -> None:
    """One line of information."""
    say(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [{tool}] [I] {text}")


def warning(text: str) -> None:
    """One warning of TensorRT-LLM."""
    say(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT-LLM] [W] {text}")
