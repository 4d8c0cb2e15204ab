"""The vocabulary of the project: frozen records and arithmetic, standard library only."""
