"""How often, and after which pauses, a server is started again."""

from pipelines.serving.foreground import STEADY_S, RestartBudget


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_and_the_number_is_bounded() -> None:
    budget = RestartBudget(7, Clock())
    assert [budget.take() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]


def test_no_restart_is_allowed_with_0() -> None:
    assert RestartBudget(0, Clock()).take() is None


def test_a_server_that_ran_long_enough_gets_its_restarts_back() -> None:
    """Counted from when it was ready again, not from when it failed."""
    clock = Clock()
    budget = RestartBudget(2, clock)
    assert [budget.take(), budget.take(), budget.take()] == [1, 2, None]
    clock.now = 100
    budget.ready()
    clock.now = 100 + STEADY_S - 1
    assert budget.take() is None
    clock.now = 100 + STEADY_S
    assert budget.take() == 1
