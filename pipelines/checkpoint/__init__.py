"""TensorRT-LLM checkpoints: read, merge ranks, unpack. Needs only numpy and ml_dtypes, which are imported on use."""
