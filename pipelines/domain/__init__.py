"""The words of the project: frozen records and arithmetic, standard library only."""
