"""Diagnose this machine: its parts, what works on it, and how to fix the rest. No probe ever crashes."""
