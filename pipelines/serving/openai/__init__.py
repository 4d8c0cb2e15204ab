"""The service in front of a tritonserver: OpenAI's interface, and the only way in from other machines.

A separate process, connected to the server by gRPC streams.
"""
