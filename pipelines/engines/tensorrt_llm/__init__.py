"""The engine `tensorrt_llm`: TensorRT engines of TensorRT-LLM 1.2, built with trtllm-build."""
