"""Levels that were measured survive an error, and a run that was killed."""

import errno
import json

import pytest

from pipelines.domain.benchmark import RESULT, BenchmarkResult, ClientHealth, Distribution, LoadPoint, Slo, Summary
from pipelines.host.files import write_json
from pipelines.store.store import PENDING, Store, recover, salvaging

NOTHING = Distribution(0)
SUMMARY = Summary(
    window_s=1.0, requests=1, errors={}, requests_per_s=1.0, output_tokens_per_s=8.0, total_tokens_per_s=16.0,
    goodput_per_s=None, isl=NOTHING, osl=NOTHING, ttft_s=NOTHING, itl_s=NOTHING, e2e_s=NOTHING,
)  # fmt: skip
LEVEL = LoadPoint("closed", 4, None, SUMMARY, ClientHealth(False, "", {}), {}, "requests-0.json.gz")
KEY = "0123456789abcdef" * 4


def result(levels):
    return BenchmarkResult("m", "fp8", "openvino", 1, 1, {}, {}, {}, {}, {}, "2026-11-21T00:00:00+00:00", Slo(), levels)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def staging(store):
    folder = store.root / ".drafts" / KEY[:16]
    folder.mkdir(parents=True)
    return folder


MANIFEST = {"key": KEY, "stage": "benchmark", "label": "m-fp8", "created": "2026-11-21T00:00:00+00:00", "made_from": {}}


def measure(staging, levels):
    write_json(staging / RESULT, result(levels).to_json())


def test_a_good_end_leaves_no_trace(store, staging):
    with salvaging(staging, dict(MANIFEST), store):
        measure(staging, (LEVEL,))
    assert sorted(path.name for path in staging.iterdir()) == [RESULT]


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("server fell over"), "server fell over"), (KeyboardInterrupt(), "interrupted")]
)
def test_what_was_measured_before_an_error_is_kept_and_says_why(store, staging, error, reason):
    def fail():
        with salvaging(staging, dict(MANIFEST), store):
            measure(staging, (LEVEL,))
            raise error

    with pytest.raises(type(error)):
        fail()
    artifact = store.find("benchmark", KEY)
    read = BenchmarkResult.from_json(json.loads((artifact.path / RESULT).read_text()))
    assert (read.complete, read.reason, len(read.levels)) == (False, reason, 1)
    assert artifact.facts["reason"] == reason


def test_an_error_before_the_first_level_keeps_nothing(store, staging):
    with pytest.raises(RuntimeError, match="too early"), salvaging(staging, dict(MANIFEST), store):
        raise RuntimeError("too early")
    assert store.find("benchmark", KEY) is None


def test_a_killed_run_is_found_by_the_next(store, staging):
    write_json(staging / PENDING, MANIFEST)
    measure(staging, (LEVEL,))
    (artifact,) = recover(store)
    assert artifact.facts["reason"] == "the run was killed"
    assert not staging.exists()
    assert recover(store) == []


def test_a_run_that_is_going_on_is_left_alone(store, staging):
    write_json(staging / PENDING, MANIFEST)
    measure(staging, (LEVEL,))
    with store.lock(KEY, lambda: None):
        assert recover(store) == []
    assert staging.exists()


def test_what_was_measured_before_the_disk_filled_waits_for_the_next_run(store, monkeypatch):
    """Neither the result's mark nor the manifest can be written any more."""

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def run_out_of_space():
        with store.staging(KEY) as staging, salvaging(staging, dict(MANIFEST), store):
            measure(staging, (LEVEL,))
            monkeypatch.setattr("pipelines.store.store.write_json", full)
            full()

    with pytest.raises(OSError, match="No space left on device"):
        run_out_of_space()
    monkeypatch.undo()
    (artifact,) = recover(store)
    assert artifact.facts["levels"] == 1
    assert sorted(path.name for path in artifact.path.iterdir()) == [RESULT, "manifest.json"]
    assert list((store.root / ".drafts").iterdir()) == []
