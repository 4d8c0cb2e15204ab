"""`make test-gpu`: the tests that need a GPU. A lane that ran none has failed."""

import sys

import pytest


class Counter:
    """Counts the tests that really ran."""

    def __init__(self) -> None:
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A call phase that was not skipped is a test that ran."""
        if report.when == "call" and not report.skipped:
            self.ran += 1


def main() -> int:
    """Run tests/gpu*, and fail when none of them could run."""
    counter = Counter()
    code = pytest.main(["tests/gpu", "tests/gpu_trtllm", "-q", "-rs", "--timeout=1800"], plugins=[counter])
    if counter.ran == 0:
        sys.stderr.write("No GPU test ran: this machine has no CUDA GPU, or PyTorch cannot see it.\n")
        return 1
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
