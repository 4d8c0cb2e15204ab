"""Iteration-level simulation of batching: static against in-flight, in ticks or in seconds. Pure: numpy, no torch."""
