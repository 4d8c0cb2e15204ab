"""The load generator for Triton servers: workloads, arrival processes, client processes, results."""
