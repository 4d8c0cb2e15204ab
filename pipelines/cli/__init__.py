"""The command line: a table of commands, their help, and checks of the arguments."""
