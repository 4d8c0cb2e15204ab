"""Servers and small models that tests run against; nothing here is a stub of our own code."""
