"""Load on a Triton server, and what it did with it: workloads, arrival processes, the client processes, the result."""
