"""The CPU engine: an OpenVINO graph built from the TensorRT-LLM checkpoint. Only this package imports OpenVINO."""

import os

# The plugin keeps compiled kernels itself, bounded (`runtime.KERNEL_CACHE`); oneDNN would keep 1024 a second time.
# It reads this when OpenVINO is imported, so it stands before that.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
