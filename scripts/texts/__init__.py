"""The real texts that ship with the project, and where they come from."""
