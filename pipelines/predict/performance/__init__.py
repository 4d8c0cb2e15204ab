"""The performance model: the cost of an engine iteration and the memory of a GPU."""
