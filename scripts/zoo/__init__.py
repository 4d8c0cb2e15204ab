"""Two tiny trained language models, and the synthetic domain they know.

A model with random weights scores 25 % before and after quantization, so it cannot show what
quantization costs. This package makes two models small enough to live in the repository, yet
trained to answer an MMLU-shaped question set (``mini_mmlu``). Everything is generated from seeds.
"""
