"""Running a plan: what is finished stays, what fails leaves nothing, two runs make one artifact."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.registry import OPENVINO
from pipelines.plan.deployment import Deployment
from pipelines.plan.engine_nodes import Node
from pipelines.plan.flow import in_order
from pipelines.plan.plan import Plan, _resolve, explain
from pipelines.run.runner import run
from pipelines.settings.compose import load
from pipelines.store.sources import InputSource
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE


@dataclass(frozen=True)
class Write:
    """A stage that writes its text; for these tests only."""

    name: str
    text: str = "x"
    fails: BaseException | None = None
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def identity(self):
        return {"text": self.text}

    def run(self, inputs, out_dir, progress):
        (out_dir / "out.txt").write_text(self.text + "".join(sorted(path.name for path in inputs.values())))
        if self.fails:
            raise self.fails
        return {"length": len(self.text)}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def plan_of(store, *stages):
    """Each stage reads the one before."""
    found, before = [], InputSource(Path("/input"), "digest")
    for stage in stages:
        found.append(Node(stage.name, stage, "label", {"given": before}))
        before = stage.name
    settings = load(["engine=openvino"])
    return Plan(Deployment(settings, "build", OPENVINO, MACHINE), "", _resolve(found, store), ())


def execute(store, *stages):
    return [o.state for o in run(plan_of(store, *stages), store, ["quant=fp8"], SilentProgress())]


def test_a_second_run_does_nothing(store):
    stages = Write("one"), Write("two")
    assert execute(store, *stages) == ["made", "made"]
    assert execute(store, *stages) == ["cached", "cached"]
    assert plan_of(store, *stages).is_done


def test_a_changed_setting_reruns_what_depends_on_it(store):
    execute(store, Write("one"), Write("two"))
    changed = plan_of(store, Write("one"), Write("two", text="y"))
    assert [(step.state, step.why) for step in changed.steps][1] == ("run", "text x -> y")


def test_equal_bytes_stop_the_chain(store):
    """A stage that ran again but wrote the same leaves what follows cached."""

    @dataclass(frozen=True)
    class Renamed(Write):
        def identity(self):
            return {"text": self.text, "irrelevant": 1}

    execute(store, Write("one"), Write("two"))
    assert [s.state for s in plan_of(store, Renamed("one"), Write("two")).steps] == ["run", "waits"]
    assert execute(store, Renamed("one"), Write("two")) == ["made", "cached"]


def test_the_manifest_says_how_to_repeat(store):
    execute(store, Write("one"))
    manifest = store.history("one")[0]
    assert manifest["repeat"] == "python -m pipelines build quant=fp8"
    assert manifest["settings"]["quant"]["qformat"] == "fp8"
    assert manifest["facts"] == {"length": 1}
    assert {"git_commit", "machine", "seconds", "peak_memory_bytes", "made_from", "files"} <= manifest.keys()
    assert manifest["peak_memory_bytes"] > 2**20


@pytest.mark.parametrize("failure", [RuntimeError("crash"), KeyboardInterrupt()])
def test_a_failing_stage_leaves_nothing_and_keeps_the_finished(store, failure):
    with pytest.raises(type(failure)):
        execute(store, Write("one"), Write("two", fails=failure))
    assert [s.state for s in plan_of(store, Write("one"), Write("two")).steps] == ["cached", "run"]
    assert list((store.root / ".drafts").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"Stage one stopped: the disk of /dev/x is full"),
        (errno.EACCES, r"no permission to read or write /dev/x"),
    ],
)
def test_disk_errors_are_said_in_the_users_words(store, code, message):
    with pytest.raises(UserError, match=message):
        execute(store, Write("one", fails=OSError(code, os.strerror(code), "/dev/x")))


def test_other_os_errors_stay_crashes(store):
    with pytest.raises(FileNotFoundError):
        execute(store, Write("one", fails=FileNotFoundError(2, "missing")))


def test_explain_names_the_nearest_difference():
    def manifest(**settings):
        return {"made_from": {"settings": settings, "inputs": {"model": "a"}, "libraries": {"torch": "2"}}}

    now = {"settings": {"size": 4, "seed": 1}, "inputs": {"model": "b"}, "libraries": {"torch": "3"}}
    past = [manifest(size=9, seed=9), manifest(size=4, seed=1)]
    assert explain(now, past) == "input model changed, library torch 2 -> 3"
    assert explain(now, []) == "never made before"


def test_what_was_never_made_is_not_compared_with_artifacts_of_another_label(store):
    execute(store, Write("one", text="a"))
    other = Node("one", Write("one", text="b"), "other", {"given": InputSource(Path("/other"), "another digest")})
    (step,) = _resolve([other], store)
    assert step.why == "never made before"


SLOW = """
import sys, time
from pathlib import Path
from tests.unit.core.test_runner import Write, execute
from pipelines.store.store import Store

class Slow(Write):
    def run(self, inputs, out_dir, progress):
        facts = super().run(inputs, out_dir, progress)
        print("started", flush=True)
        time.sleep(float(sys.argv[2]))
        return facts

print(execute(Store(Path(sys.argv[1])), Slow("one")), flush=True)
"""


def start_slow(store, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(store.root), str(seconds)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def test_a_killed_run_is_finished_by_running_again(store):
    process = start_slow(store, 60)
    line = ""
    while "started" not in line:
        line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert store.find("one", plan_of(store, Write("one")).steps[0].key or "") is None
    assert execute(store, Write("one")) == ["made"]


def test_two_runs_at_once_make_one_artifact(store):
    first, second = start_slow(store, 1.5), start_slow(store, 1.5)
    answers = sorted(process.communicate(timeout=60)[0].splitlines()[-1] for process in (first, second))
    assert answers == ["['cached']", "['made']"]
    assert len(store.history("one")) == 1


def test_history_is_newest_first(store):
    execute(store, Write("one", text="a"))
    time.sleep(1.1)  # manifests are stamped in seconds
    execute(store, Write("one", text="b"))
    assert [json.dumps(m["made_from"]["settings"]) for m in store.history("one")] == ['{"text": "b"}', '{"text": "a"}']


def test_an_artifact_that_was_removed_after_planning_is_made_again(store):
    """By `make prune` in another terminal, for example."""
    execute(store, Write("one"), Write("two"))
    made = plan_of(store, Write("one"), Write("two"))
    shutil.rmtree(made.steps[0].artifact.path)
    assert [o.state for o in run(made, store, [], SilentProgress())] == ["made", "cached"]


def test_what_a_run_reads_is_in_use_until_it_ends(store):
    seen = []

    class Looks(Write):
        def run(self, inputs, out_dir, progress):
            seen.extend(lease.uses for lease in store.leases.all() if lease.alive and lease.uses)
            return super().run(inputs, out_dir, progress)

    execute(store, Write("one"))
    cached = plan_of(store, Write("one")).steps[0].artifact.path
    execute(store, Write("one"), Looks("two"))
    assert seen == [{cached.name}]
    assert store.leases.all() == []


def test_nodes_are_ordered_by_what_they_read_and_otherwise_as_given():
    """Each once: what several stages read may be listed before each of them."""
    after, read = (Node(name, Write(name), "label", inputs) for name, inputs in (("a", {"given": "c"}), ("c", {})))
    other = Node("b", Write("b"), "label", {"given": InputSource(Path("/input"), "digest")})
    assert [node.id for node in in_order([after, other, read, read])] == ["b", "c", "a"]
    assert [node.id for node in in_order([read, after, other])] == ["c", "a", "b"]
