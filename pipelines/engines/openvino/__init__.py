"""The CPU engine: an OpenVINO graph built from the TensorRT-LLM checkpoint. Only this package imports OpenVINO."""

import os

# The plugin keeps compiled kernels itself, bounded (`cpu_memory.KERNEL_CACHE`); oneDNN would keep its own beside them.
# It reads this when OpenVINO is imported, so it stands before that.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
