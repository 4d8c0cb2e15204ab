"""The engine flavour `tensorrt_llm`: TensorRT engines of TensorRT-LLM 1.2, built with trtllm-build."""
