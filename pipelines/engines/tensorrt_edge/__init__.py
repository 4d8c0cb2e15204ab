"""TensorRT Edge-LLM: its exporter, which runs in an environment of its own, and what its graph holds."""
