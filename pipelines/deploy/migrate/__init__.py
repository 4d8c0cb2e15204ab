"""`make migrate`: what becomes of a TensorRT-LLM 1.2 deployment in the LLM API."""
