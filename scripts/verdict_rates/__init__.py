"""Measure how often the verdict on a loss of accuracy is wrong, by drawing stored answers again and again."""
