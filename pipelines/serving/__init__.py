"""Run tritonserver as a process: find it, start it, wait for it, drain it, and leave nothing behind."""
