"""Iteration-level simulation of static and in-flight batching, in ticks or in seconds. Pure: numpy, no torch."""
