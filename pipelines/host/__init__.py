"""This machine: its hardware, files, screen and helper processes."""
