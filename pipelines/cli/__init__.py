"""The command line: a table of commands, their help, and the check of the words that are given."""
