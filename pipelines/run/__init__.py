"""Run one plan and show it."""
