"""Folder = machine it needs: unit, contract, property, golden, e2e, gpu, gpu_trtllm."""
