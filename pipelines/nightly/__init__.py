"""A matrix of deployments measured every night, their history, and what got worse since."""
