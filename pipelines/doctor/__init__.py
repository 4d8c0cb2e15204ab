"""Diagnose this machine: what it has, what works on it, and what to do about the rest. No probe ever crashes."""
