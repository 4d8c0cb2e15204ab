"""Parts of `scripts/same_bytes.py`: the commands it runs, the files it reads, and the comparison of two recordings."""
