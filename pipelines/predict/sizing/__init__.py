"""Closed-form fleet sizes and costs. Pure: no torch, no files."""
