"""Inference engines behind one common interface."""
