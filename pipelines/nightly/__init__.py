"""A matrix of deployments measured every night, their history, and the regressions since earlier nights."""
