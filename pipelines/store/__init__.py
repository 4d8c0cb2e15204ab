"""Artifacts on disk, looked up by the inputs they were made from."""
