"""Parts of `scripts/same_bytes.py`: the commands it runs, the files it reads, and how two recordings are compared."""
