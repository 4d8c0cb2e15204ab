"""Measure accuracy: MMLU through lm-eval with one of our engines as the model, and the loss due to compression."""
