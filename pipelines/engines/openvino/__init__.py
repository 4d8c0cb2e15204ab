"""The CPU engine: an OpenVINO graph built from the TensorRT-LLM checkpoint. Only this package imports OpenVINO."""
