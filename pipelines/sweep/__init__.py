"""Sweeps: each combination of settings (a cell) runs in its own process, started by one of Hydra's launchers."""
