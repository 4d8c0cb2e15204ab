"""Fit the performance model to the published measurements, cross-validate it and write docs/sizing.md.

The product ships only the result (`pipelines/predict/performance/parameters.json`); this package produces it.
"""
