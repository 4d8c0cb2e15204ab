"""Sweeps: every cell a process of its own, started by whichever launcher of Hydra's is asked for."""
