"""`python -m pipelines`: the same as the console script `trtllm-pipelines`."""

from pipelines.cli.main import program

if __name__ == "__main__":
    program()
