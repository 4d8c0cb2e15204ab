"""Parts of `scripts/same_bytes.py`: the commands it runs, and the files it reads."""
