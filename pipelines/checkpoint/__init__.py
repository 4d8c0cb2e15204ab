"""The TensorRT-LLM checkpoint: read, merge ranks, unpack. Needs numpy and ml_dtypes only, imported on use."""
