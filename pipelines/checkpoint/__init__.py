"""The TensorRT-LLM checkpoint: read, merge ranks, dequantize. Needs numpy and ml_dtypes only, imported on use."""
