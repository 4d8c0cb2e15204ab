"""OpenAI-compatible service in front of a tritonserver: a separate process connected to it by gRPC streams."""
