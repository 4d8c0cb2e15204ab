"""Accuracy: MMLU through lm-eval with one of our engines as the model, and what compression cost."""
