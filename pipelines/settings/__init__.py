"""Settings: one module per group of conf/, judged by pydantic."""
