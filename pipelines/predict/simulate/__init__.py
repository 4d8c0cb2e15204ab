"""`make simulate`: settings -> simulated runs -> table, files, pictures, trace, page."""
