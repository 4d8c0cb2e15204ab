"""Write lines in the format of TensorRT-LLM's logger."""

import sys
import time
from importlib import metadata


def version() -> str:
    """Return the version of the emulated package."""
    return metadata.version("tensorrt_llm")


def say(text: str) -> None:
    """Write one line unchanged."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def info(text: str, tool: str = "TRT-LLM") -> None:
    """Write one informational line."""
    say(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [{tool}] [I] {text}")


def warning(text: str) -> None:
    """Write one TensorRT-LLM warning."""
    say(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] [TRT-LLM] [W] {text}")
