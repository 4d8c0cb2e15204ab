"""Servers and small models that tests run against; nothing here replaces our own code."""
