"""Rot is found: bytes that changed behind our back are named, set aside and made again, never used."""

import json
import os
import re
import shutil

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.run.runner import run
from pipelines.store import manifest
from pipelines.store.manifest import DamagedError, HashCache, read_manifest, sealed
from pipelines.store.sources import files_source
from pipelines.store.store import Store
from tests.unit.core.test_artifacts import make
from tests.unit.core.test_runner import Write, execute, plan_of


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def overwrite(path, content=None):
    """Replace bytes in place, with size, inode and modification time as before."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(stat.st_size) if content is None else content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def the_artifact(store, stage):
    (folder,) = (store.root / stage).iterdir()
    return folder


def test_zeros_with_size_and_time_kept_are_found(store):
    path = make(store).path / "sub" / "a.bin"
    overwrite(path)
    with pytest.raises(DamagedError, match=r"sub/a\.bin has SHA-256 \w+ instead of"):
        store.find("quantize", "k" * 64)


def test_a_hash_that_is_known_does_not_hide_other_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    cache = HashCache(tmp_path / "cache.json")
    first = cache.sha256(path)
    overwrite(path, b"two")
    assert cache.sha256(path) != first


def test_a_write_in_the_same_tick_as_the_reading_is_noticed(tmp_path):
    """The kernel's clock stands still for some milliseconds, in which a second write has the same change time."""
    cache = HashCache(tmp_path / "cache.json")
    for number in range(20):
        path = tmp_path / str(number)
        path.write_text("one")
        first = cache.sha256(path)
        overwrite(path, b"two")
        assert cache.sha256(path) != first


def test_hard_links_share_what_is_known(tmp_path, monkeypatch):
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_text("one")
    os.link(path, link)
    cache = HashCache(tmp_path / "cache.json")
    first = cache.sha256(path)
    monkeypatch.setattr(manifest, "sha256_file", None)
    assert cache.sha256(link) == first


def test_after_a_month_the_bytes_are_read_again(tmp_path, monkeypatch):
    """A disk that loses bytes by itself changes no time of the file."""
    path = tmp_path / "a"
    path.write_text("one")
    cache = HashCache(tmp_path / "cache.json")
    first, now = cache.sha256(path), manifest.time.time()
    monkeypatch.setattr(manifest, "sha256_file", lambda _path: "other bytes")
    monkeypatch.setattr(manifest.time, "time", lambda: now + 29 * 86400)
    assert cache.sha256(path) == first
    monkeypatch.setattr(manifest.time, "time", lambda: now + 31 * 86400)
    assert cache.sha256(path) == "other bytes"


@pytest.mark.parametrize("content", ["[]", "{", '{"files": {}}', '{"/a": [1, 2, 3, "x"]}', "\x00" * 40])
def test_a_damaged_cache_only_costs_time(tmp_path, content):
    path = tmp_path / "a"
    path.write_text("one")
    wanted = HashCache(tmp_path / "none.json").sha256(path)
    (tmp_path / "cache.json").write_text(content)
    cache = HashCache(tmp_path / "cache.json")
    assert cache.sha256(path) == wanted
    cache.save()
    assert "checksum" in json.loads((tmp_path / "cache.json").read_text())


def test_a_hash_altered_in_the_cache_does_not_count(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    cache = HashCache(tmp_path / "cache.json")
    first = cache.sha256(path)
    cache.save()
    (tmp_path / "cache.json").write_text((tmp_path / "cache.json").read_text().replace(first, "0" * 64))
    assert HashCache(tmp_path / "cache.json").sha256(path) == first


def test_two_runs_do_not_lose_each_others_hashes(tmp_path):
    first, second = HashCache(tmp_path / "cache.json"), HashCache(tmp_path / "cache.json")
    for name, cache in (("a", first), ("b", second)):
        (tmp_path / name).write_text(name)
        cache.sha256(tmp_path / name)
        cache.save()
    assert len(json.loads((tmp_path / "cache.json").read_text())["files"]) == 2


def test_a_damaged_artifact_is_named_set_aside_and_made_again(store, capsys):
    execute(store, Write("one"), Write("two"))
    folder = the_artifact(store, "one")
    overwrite(folder / "out.txt")
    steps = plan_of(store, Write("one"), Write("two")).steps
    assert (steps[0].state, steps[1].state) == ("run", "waits")
    assert f"{folder} was changed after it was made: out.txt has SHA-256" in steps[0].why
    assert folder.is_dir()  # planning changes nothing
    assert execute(store, Write("one"), Write("two")) == ["made", "cached"]
    output = " ".join(capsys.readouterr().out.split())
    assert f"{folder.name} was changed after it was made: out.txt has SHA-256" in output
    assert (store.root / ".set_aside" / "one" / folder.name / "out.txt").read_bytes() == bytes(6)
    assert (folder / "out.txt").read_text() == "xinput"


def test_damage_twice_is_set_aside_twice(store):
    for _ in range(2):
        execute(store, Write("one"))
        overwrite(the_artifact(store, "one") / "out.txt")
    execute(store, Write("one"))
    assert len(list((store.root / ".set_aside" / "one").iterdir())) == 2


def test_damage_between_plan_and_stage_is_mended_before_the_stage_reads(store):
    execute(store, Write("one"), Write("two"))
    shutil.rmtree(store.root / "two")
    plan = plan_of(store, Write("one"), Write("two"))
    overwrite(the_artifact(store, "one") / "out.txt")
    outcomes = run(plan, store, [], SilentProgress())
    assert [outcome.state for outcome in outcomes] == ["cached", "made"]
    assert (the_artifact(store, "one") / "out.txt").read_text().startswith("x")
    assert (store.root / ".set_aside" / "one").is_dir()


def test_a_users_file_that_changes_between_plan_and_stage_is_refused(store, tmp_path):
    """The key was made from the old bytes; the result would be found under it for ever."""
    texts = tmp_path / "texts.txt"
    texts.write_text("one")
    source = files_source(texts, store.hashes, "calibration.path")
    source.check(store.hashes)
    texts.write_text("two")
    with pytest.raises(UserError, match=rf"calibration\.path='{texts}' changed while this ran"):
        source.check(store.hashes)


@pytest.mark.parametrize(
    ("alter", "damage"),
    [
        (lambda text: text.replace('"seconds": ', '"seconds": 9'), "does not match its own checksum"),
        (lambda text: text.replace('"x"', '"y"'), "does not match its own checksum"),
        (lambda _text: "[]", "does not match its own checksum"),
        (lambda text: "\x00" * len(text), "is not readable JSON"),
        (lambda _text: "[" * 100_000, "is not readable JSON"),
        (lambda text: text[: len(text) // 2], "is not readable JSON"),
        (None, "is missing"),
    ],
)
def test_an_altered_manifest_is_named_and_its_artifact_made_again(store, capsys, alter, damage):
    execute(store, Write("one"))
    path = the_artifact(store, "one") / "manifest.json"
    path.unlink() if alter is None else path.write_text(alter(path.read_text()))
    assert f"manifest.json {damage}" in plan_of(store, Write("one")).steps[0].why
    assert execute(store, Write("one")) == ["made"]
    assert damage in " ".join(capsys.readouterr().out.split())
    assert plan_of(store, Write("one")).is_done


def test_an_artifact_of_an_early_version_is_not_said_to_be_changed(store, capsys):
    execute(store, Write("one"))
    path = the_artifact(store, "one") / "manifest.json"
    path.write_text(json.dumps({key: each for key, each in read_manifest(path.parent).items() if key != "checksum"}))
    said = "cannot be verified: manifest.json has no checksum of its own"
    with pytest.raises(DamagedError, match=said):
        read_manifest(path.parent)
    assert said in plan_of(store, Write("one")).steps[0].why
    assert execute(store, Write("one")) == ["made"]
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_manifest_with_a_flipped_bit_is_never_taken_for_another(store):
    """Either it is refused, or it means the same: JSON has several ways to write one value."""
    execute(store, Write("one"))
    folder = the_artifact(store, "one")
    whole, read = (folder / "manifest.json").read_bytes(), read_manifest(folder)
    for at in range(0, len(whole), 41):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (folder / "manifest.json").write_bytes(flipped)
        try:
            assert read_manifest(folder) == read
        except DamagedError:
            continue


def test_one_damaged_manifest_does_not_stop_other_plans(store):
    execute(store, Write("one", text="a"))
    (the_artifact(store, "one") / "manifest.json").write_text("{")
    assert plan_of(store, Write("one", text="b")).steps[0].why == "never made before"


def test_a_reading_that_failed_once_does_not_condemn_an_artifact(store, monkeypatch):
    made = make(store)
    monkeypatch.setattr(HashCache, "sha256", lambda _self, _path: "a bit flipped on the way from the disk")
    store.check(made)


def verify(*words):
    return COMMANDS["verify"].run(words)


def two_artifacts(folder):
    store = Store(folder)
    for text in ("a", "b"):
        execute(store, Write("one", text=text))
    store.hashes.save()
    return sorted((folder / "one").iterdir())


def test_verify_alone_names_everything_that_is_damaged_and_how_to_make_it_again(tmp_path, capsys):
    first, second = two_artifacts(tmp_path)
    assert verify(f"paths.store={tmp_path}") == 0
    assert "2 artifacts, 2 files" in capsys.readouterr().out
    overwrite(first / "out.txt")
    (second / "out.txt").unlink()
    with pytest.raises(UserError) as caught:
        verify(f"paths.store={tmp_path}")
    faults = caught.value.faults
    assert [first.name in faults[0].message, second.name in faults[1].message] == [True, True]
    assert "out.txt has SHA-256" in faults[0].message
    assert "out.txt is missing" in faults[1].message
    assert {fault.command for fault in faults} == {("python", "-m", "pipelines", "build", "quant=fp8")}
    assert first.is_dir()  # it only names


@pytest.mark.parametrize("key", ["verify.path", "paths.store"])
def test_verify_of_nothing_is_refused(key, tmp_path):
    with pytest.raises(UserError, match=rf"{key}='.*/absent' cannot be verified: there is no such folder"):
        verify(f"{key}={tmp_path / 'absent'}")


def test_verify_reads_the_disk_and_not_what_is_known(tmp_path):
    """Damage that changes no time of the file: as if the cache had hashed the file after it."""
    first, _ = two_artifacts(tmp_path)
    overwrite(first / "out.txt")
    stat, cache = (first / "out.txt").stat(), tmp_path / ".hashes.json"
    known = json.loads(cache.read_text())["files"]
    name = f"{stat.st_dev}:{stat.st_ino}"
    known[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, *known[name][3:]]
    cache.write_text(json.dumps(sealed({"files": known})))
    store = Store(tmp_path)
    assert plan_of(store, Write("one", text="a")).is_done  # what a run trusts for a month
    assert plan_of(store, Write("one", text="b")).is_done
    with pytest.raises(UserError, match=rf"{first.name} was changed after it was made: out\.txt has SHA-256"):
        verify(f"paths.store={tmp_path}")
    states = [plan_of(Store(tmp_path), Write("one", text=text)).is_done for text in ("a", "b")]
    assert sorted(states) == [False, True]  # and now runs know it too


def test_verify_with_a_folder_checks_every_file(tmp_path, capsys):
    first, second = two_artifacts(tmp_path)
    overwrite(second / "out.txt")
    assert verify(f"verify.path={first}") == 0
    assert "1 file, " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"out\.txt has SHA-256"):
        verify(f"verify.path={second}")


ADDED = [
    "model-00002.safetensors",
    "adapter/adapter_model.safetensors",
    ".hidden.safetensors",
    "1/__pycache__.py",
    "link",
]


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_was_added_is_named_and_the_artifact_is_not_used(tmp_path, name):
    first, second = two_artifacts(tmp_path)
    (first / name).parent.mkdir(exist_ok=True)
    if name == "link":
        (first / name).symlink_to(second)
    else:
        (first / name).write_text("x")
    store, manifest = Store(tmp_path), read_manifest(first)
    with pytest.raises(
        DamagedError, match=rf"was changed after it was made: {re.escape(name)} was added.*Remove what was"
    ):
        store.find(manifest["stage"], manifest["key"])
    with pytest.raises(UserError, match=rf"{re.escape(name)} was added"):
        verify(f"verify.path={first}")


def test_verify_names_files_that_were_added(tmp_path, capsys):
    first, _ = two_artifacts(tmp_path)
    (first / "__pycache__").mkdir()
    (first / "__pycache__" / "model.pyc").write_text("x")
    assert verify(f"paths.store={tmp_path}") == 0
    assert "1 file that its manifest does not list: __pycache__/model.pyc" in " ".join(capsys.readouterr().out.split())


def test_verify_of_an_empty_store_says_so(tmp_path, capsys):
    assert verify(f"paths.store={tmp_path}") == 0
    out = capsys.readouterr().out
    assert "holds no artifact" in out
    assert out.endswith("nothing was verified\n")


@pytest.mark.parametrize("name", ["model.py", "manifest.json"])
def test_a_damaged_repository_is_not_served(tmp_path, name):
    store = Store(tmp_path / "store")
    with store.staging("a" * 64) as staging:
        (staging / "model.py").write_text("print(1)")
        made = store.commit(
            staging, {"key": "a" * 64, "stage": "repository", "repeat": "make it", "made_from": {}}, "m"
        )
    copy = shutil.copytree(made.path, tmp_path / "copy")
    overwrite(copy / name)
    with pytest.raises(UserError, match=rf"{copy} was changed after it was made: {name}"):
        COMMANDS["serve"].run([f"serving.repository={copy}", f"paths.store={tmp_path / 'store'}"])
