"""`make test-real`, `make test-peers`: tests that install packages of their own. A lane that ran no test has failed."""

import importlib
import os
import sys

import pytest

from tests.gpu_lane import Counter

OPTIONS = {"real": ["-x"], "peers": []}
"""Lanes, which are folders of tests/. Tests of the real model use the results of those before them."""


def main(lane: str, *words: str) -> int:
    """Prepare what the lane needs, run its tests, and fail when nothing could run."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # all is on disk
    importlib.import_module(f"tests.{lane}.prepare").main()
    counter = Counter()
    options = ["-q", "-s", "--timeout=1800", *OPTIONS[lane], *words]
    code = pytest.main([f"tests/{lane}", *options], plugins=[counter])
    if counter.ran == 0:
        sys.stderr.write(f"No test of tests/{lane} ran.\n")
        return 1
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
