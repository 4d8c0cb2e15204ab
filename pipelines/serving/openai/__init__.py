"""OpenAI-compatible access in front of a tritonserver: a process of its own that speaks gRPC streams to it."""
