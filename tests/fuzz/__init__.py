"""Fuzzing of everything that reads bytes of others: `scripts/fuzz.sh`, and the found cases as tests."""
