"""How many client processes a load gets, and how it is shared between them."""

from typing import Any

import pytest

from pipelines.loadgen.client_processes import processes_for
from pipelines.loadgen.level import _part
from tests.support.load_settings import benchmark, workload


@pytest.mark.parametrize(
    ("arrival", "how", "cpus", "processes"),
    [
        ("closed", {"concurrency": [1, 64]}, 64, 1),
        ("closed", {"concurrency": [1, 65]}, 64, 2),
        ("closed", {"concurrency": [1024]}, 64, 16),
        ("closed", {"concurrency": [1024]}, 16, 4),  # a quarter of the CPUs at most
        ("closed", {"concurrency": [1024]}, 2, 1),
        ("poisson", {"request_rate": [2, 1001]}, 64, 3),
        ("poisson", {"request_rate": [2], "processes": 5}, 2, 5),  # as asked
    ],
)
def test_processes_follow_the_load_and_the_machine(
    arrival: str, how: dict[str, Any], cpus: int, processes: int
) -> None:
    """One for 64 users or 500 requests per second."""
    assert processes_for(workload(arrival=arrival), benchmark(**how), cpus) == processes


@pytest.mark.parametrize(("whole", "parts"), [(7, 3), (2, 3), (0, 2), (64, 1)])
def test_shares_add_up(whole: int, parts: int) -> None:
    """And differ by one at most."""
    shares = [_part(whole, number, parts) for number in range(parts)]
    assert sum(shares) == whole
    assert max(shares) - min(shares) <= 1
