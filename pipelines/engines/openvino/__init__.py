"""The CPU engine: an OpenVINO graph built from the TensorRT-LLM checkpoint. Only this package imports OpenVINO."""

import os

# The plugin has its own bounded cache of compiled kernels (`cpu_memory.KERNEL_CACHE`); oneDNN would add a second one.
# oneDNN reads this when OpenVINO is imported, so it must be set first.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
