"""`make test-real`: a real model through the whole pipeline. A lane that ran no test has failed."""

from __future__ import annotations

import os
import sys

import pytest

from tests.gpu_lane import Counter
from tests.real import prepare


def main() -> int:
    """Make the model and the questions, run tests/real, and fail when nothing could run."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # all is on disk
    prepare.main()
    counter = Counter()
    code = pytest.main(["tests/real", "-q", "-s", "-x", "--timeout=1800", *sys.argv[1:]], plugins=[counter])
    if counter.ran == 0:
        sys.stderr.write("No test of the real model ran.\n")
        return 1
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
