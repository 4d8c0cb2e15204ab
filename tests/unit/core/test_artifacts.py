"""The store: whole artifacts only, found by key, changed files refused."""

import json
import os

import pytest

from pipelines.domain.errors import UserError
from pipelines.store.manifest import HashCache, sealed
from pipelines.store.store import Store, canonical, content_digest, fingerprint


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def make(store, key="k" * 64, content="weights"):
    with store.staging(key) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "a.bin").write_text(content)
        manifest = {
            "key": key,
            "stage": "quantize",
            "label": "m-fp8",
            "created": "2026",
            "seconds": 1,
            "facts": {"n": 1},
        }
        return store.commit(staging, manifest, "m-fp8")


def test_a_committed_artifact_is_found_again(store):
    made = make(store)
    found = store.find("quantize", "k" * 64)
    assert found.path == made.path
    assert found.facts == {"n": 1}
    assert found.digest == content_digest({"sub/a.bin": fingerprint_of("weights")})


def fingerprint_of(text):
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def test_another_key_is_not_found(store):
    make(store)
    assert store.find("quantize", "j" * 64) is None
    assert store.find("build", "k" * 64) is None


def test_a_draft_that_fails_leaves_nothing(store):
    def fail():
        with store.staging("k" * 64) as staging:
            (staging / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert store.find("quantize", "k" * 64) is None
    assert list((store.root / ".drafts").iterdir()) == []


def test_the_slower_of_two_hosts_takes_what_the_faster_one_made(store):
    """Locks of some shared file systems hold on one host only: nothing is broken, work is done twice."""
    manifest = {"key": "k" * 64, "stage": "build", "label": "m", "facts": {}}
    with store.staging("k" * 64) as slow:
        (slow / "a.bin").write_text("weights")
        with store.staging("k" * 64) as fast:
            assert fast != slow
            (fast / "a.bin").write_text("weights")
            made = store.commit(fast, manifest, "m")
        assert store.commit(slow, manifest, "m").path == made.path
    assert list((store.root / ".drafts").iterdir()) == []


def test_a_draft_starts_empty_after_a_kill(store):
    with store.staging("k" * 64) as staging:
        left = staging
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    with store.staging("k" * 64) as staging:
        assert list(staging.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("weightz"), r"was changed after it was made: sub/a\.bin has SHA-256"),
        (lambda path: path.write_text("longer weights"), r"sub/a\.bin has 14 bytes instead of 7"),
        (lambda path: path.unlink(), r"sub/a\.bin is missing"),
    ],
)
def test_a_changed_artifact_is_refused(store, change, message):
    change(make(store).path / "sub" / "a.bin")
    with pytest.raises(UserError, match=message):
        store.find("quantize", "k" * 64)


def test_a_touched_but_equal_file_is_accepted(store):
    path = make(store).path / "sub" / "a.bin"
    os.utime(path, ns=(1, 1))
    assert store.find("quantize", "k" * 64) is not None


def test_an_unreadable_manifest_is_refused(store):
    (make(store).path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is not readable JSON"):
        store.find("quantize", "k" * 64)


def test_hash_cache_reads_a_file_again_only_when_it_changed(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    cache = HashCache(tmp_path / "cache.json")
    first = cache.sha256(path)
    cache.save()
    known = json.loads((tmp_path / "cache.json").read_text())["files"]
    known[f"{path.stat().st_dev}:{path.stat().st_ino}"][4] = "remembered"
    (tmp_path / "cache.json").write_text(json.dumps(sealed({"files": known})))
    assert HashCache(tmp_path / "cache.json").sha256(path) == "remembered"
    path.write_text("two")
    assert HashCache(tmp_path / "cache.json").sha256(path) not in ("remembered", first)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_a_value_without_one_json_form_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        canonical(value)


def test_fingerprint_does_not_depend_on_order():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})


def test_a_lock_is_waited_for(store):
    waited = []
    import threading

    started, release = threading.Event(), threading.Event()

    def hold():
        with store.lock("k" * 64, lambda: None):
            started.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    started.wait(60)
    threading.Timer(0.1, release.set).start()
    with store.lock("k" * 64, lambda: waited.append(True)):
        pass
    thread.join()
    assert waited == [True]
