"""What a stopped run has made of an artifact is taken over by the next run of the same artifact, and by no other."""

from contextlib import suppress

import pytest

from pipelines.domain.errors import ContinuableError
from pipelines.domain.progress import PARTIAL
from pipelines.store.leases import LEASES
from pipelines.store.store import Store, recover

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def begin(folder):
    (folder / PARTIAL).mkdir()
    (folder / "rank0.safetensors").write_text("two layers")


def stop(store, error, key=KEY):
    """Begin an artifact that can be continued, and end with an error."""
    with suppress(error), store.staging(key) as folder:
        begin(folder)
        raise error("stopped")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ContinuableError])
def test_a_stopped_draft_is_taken_over_once(store, error):
    stop(store, error)
    with store.staging(KEY) as folder:
        assert (folder / "rank0.safetensors").read_text() == "two layers"
        with store.staging(KEY) as second:
            assert list(second.iterdir()) == []


def test_a_killed_draft_is_taken_over(store):
    """Its lease is gone or dead, and its folder is as the kill left it."""
    folder = store.root / ".drafts" / f"{KEY[:16]}.00000000"
    folder.mkdir(parents=True)
    begin(folder)
    assert recover(store) == []
    with store.staging(KEY) as continued:
        assert (continued / PARTIAL).is_dir()
    assert not folder.exists()


def test_another_artifact_begins_anew(store):
    stop(store, KeyboardInterrupt)
    with store.staging(OTHER) as folder:
        assert list(folder.iterdir()) == []


def test_a_draft_at_work_is_left_alone(store):
    with store.staging(KEY) as folder:
        begin(folder)
        with store.staging(KEY) as second:
            assert list(second.iterdir()) == []
        assert (folder / PARTIAL).is_dir()


def test_an_error_that_running_again_would_meet_again_leaves_nothing(store):
    stop(store, ValueError)
    with store.staging(KEY) as folder:
        assert list(folder.iterdir()) == []


def test_only_prune_removes_what_can_be_continued(store):
    stop(store, KeyboardInterrupt)
    recover(store)
    (staging,) = [each for each in (store.root / ".drafts").iterdir() if each.name != LEASES]
    assert (staging / PARTIAL).is_dir()
    recover(store, continuable=False)
    assert not staging.exists()
