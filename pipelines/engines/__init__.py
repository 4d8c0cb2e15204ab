"""Engines: one port, several flavours behind it."""
