"""Closed-form sizes and costs. Pure: no torch, no files."""
