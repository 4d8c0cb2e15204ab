"""From an open LLM to a served, measured, accuracy-checked TensorRT-LLM deployment."""

__version__ = "0.2.0"
