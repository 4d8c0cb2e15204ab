"""The kernel's count of processes killed for want of memory, as control groups of both versions show it."""

from pathlib import Path

import pytest

from pipelines.host.lifetimes import MemoryKills

V2 = "low 0\nhigh 0\nmax 7\noom 2\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/box/app", "sys/fs/cgroup/box/app/memory.events", V2),
        ("0::/../hosts/path", "sys/fs/cgroup/memory.events", V2),  # in a container that sees its own group only
        ("9:name=systemd:/\n4:cpu,memory:/box\n0::/", "sys/fs/cgroup/memory/box/memory.oom_control", V1),
        ("0::/", "proc/vmstat", "pgfault 12\noom_kill {}\n"),
    ],
)
def test_a_kill_for_memory_is_seen_where_the_kernel_counts_it(
    tmp_path: Path, groups: str, file: str, text: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    counter = tmp_path / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(text.format(3))
    kills = MemoryKills(tmp_path)
    assert kills.happened() is False
    counter.write_text(text.format(4))
    assert kills.happened() is True


def test_a_kill_of_another_process_long_ago_is_forgotten(tmp_path: Path) -> None:
    """But not one of the last seconds, in which the process that was killed may still be ending."""
    (tmp_path / "proc").mkdir()
    counter, now = tmp_path / "proc/vmstat", [0.0]
    counter.write_text("oom_kill 0\n")
    kills = MemoryKills(tmp_path, clock=lambda: now[0])
    counter.write_text("oom_kill 1\n")
    for second in range(1, 20):
        now[0] = second
        kills.reset()
        assert kills.happened() is True
    for second in range(20, 31):
        now[0] = second
        kills.reset()
    assert kills.happened() is False


def test_nothing_is_claimed_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).happened() is None
