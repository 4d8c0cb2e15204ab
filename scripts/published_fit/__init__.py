"""Fit the performance model to the published measurements, cross-validate it and write docs/accuracy.md.

The product ships with the outcome (`pipelines/predict/performance/parameters.json`); this package makes it.
"""
