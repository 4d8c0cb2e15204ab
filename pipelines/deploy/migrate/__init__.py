"""`make migrate`: translate a TensorRT-LLM 1.2 deployment to the LLM API."""
