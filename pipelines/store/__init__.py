"""Artifacts on disk, found by what they were made from."""
