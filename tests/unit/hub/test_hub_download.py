"""A repository becomes a folder of verified files; the client is the real one, the Hub is on loopback."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.file_download import http_get, repo_folder_name

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import Advance, SilentProgress
from pipelines.hub import HubSource, download_dataset
from pipelines.stages.download import Download
from tests.support.hub_client import TOKEN, Client, Notes
from tests.support.hub_repos import LLAMA, write_dataset, write_model
from tests.support.hub_server import HubServer
from tests.support.records import differing

WEIGHTS = "model.safetensors"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}


def names(folder: Path) -> set[str]:
    """Relative names of all files of a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_what_a_model_needs_is_fetched(hub: HubServer, repo: Path, client: Client) -> None:
    """No pickles, scripts, other folders, and nothing of the client's own bookkeeping."""
    commit = hub.add("tiny/llama", repo).commit

    snapshot = client.download()

    assert names(client.out) == SMALL | {WEIGHTS} == set(snapshot.files)
    assert snapshot.commit == commit
    assert differing(client.out, snapshot.files) == []
    assert (client.out / WEIGHTS).read_bytes() == (repo / WEIGHTS).read_bytes()
    assert hub.bytes_sent("pytorch_model.bin") == 0


@pytest.mark.parametrize(("stated", "known"), [("gemma", "gemma"), ("", None)])
def test_the_licence_is_what_the_card_states(hub: HubServer, repo: Path, client: Client, stated, known) -> None:
    hub.add("tiny/llama", repo).license = stated
    assert client.download().license == known


def test_weights_are_links_into_the_cache(hub: HubServer, repo: Path, client: Client) -> None:
    """One copy of the weights on the disk; configuration is a copy, since people edit it."""
    hub.add("tiny/llama", repo)

    client.download()

    blobs = {path.stat().st_ino for path in client.cache.glob("models--tiny--llama/blobs/*")}
    assert (client.out / WEIGHTS).stat().st_ino in blobs
    assert (client.out / "config.json").stat().st_ino not in blobs
    assert client.notes.lines == []


def test_another_disk_gets_a_copy_and_says_so(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hard links are not possible the weights are copied."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    hub.add("tiny/llama", repo)

    snapshot = client.download()

    assert differing(client.out, snapshot.files) == []
    assert any("Copied 195.4 KiB" in line and str(client.out) in line for line in client.notes.lines)


def test_the_second_download_asks_one_question(hub: HubServer, repo: Path, client: Client) -> None:
    """What is cached is verified and linked; only the commit is looked up."""
    hub.add("tiny/llama", repo)
    first = client.download()
    hub.forget()

    assert client.download() == first
    assert [request.path for request in hub.requests] == ["/api/models/tiny/llama/revision/main"]


def test_a_new_commit_fetches_only_what_changed(hub: HubServer, repo: Path, client: Client) -> None:
    """Weights that two commits share are not fetched twice."""
    hub.add("tiny/llama", repo)
    first = client.download()
    (repo / "generation_config.json").write_text('{"eos_token_id": 3}')
    hub.add("tiny/llama", repo)
    hub.forget()

    second = client.download()

    assert second.commit != first.commit
    assert hub.bytes_sent("generation_config.json") == 19
    assert hub.bytes_sent(WEIGHTS) == 0


def test_all_shards_of_the_index_are_fetched(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """A sharded model is its index and the files that it names."""
    hub.add("tiny/llama", write_model(tmp_path / "sharded", shards=3, weight_bytes=50_000))

    snapshot = client.download()

    shards = {f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)}
    assert set(snapshot.files) == SMALL | shards | {"model.safetensors.index.json"}


def test_a_commit_can_be_asked_for(hub: HubServer, repo: Path, client: Client) -> None:
    """A revision may be 40 hex digits."""
    commit = hub.add("tiny/llama", repo).commit

    assert client.download(revision=commit).commit == commit


def test_a_branch_with_a_slash_can_be_asked_for(hub: HubServer, repo: Path, client: Client) -> None:
    """As pull requests of the Hub are named."""
    commit = hub.add("tiny/llama", repo, branches=("refs/pr/1",)).commit

    assert client.download(revision="refs/pr/1").commit == commit


def test_progress_counts_every_byte_once(hub: HubServer, repo: Path, client: Client) -> None:
    """The line ends at its total, on the first run and on the cached one."""
    lines: list[list[float]] = []

    class Counted(Notes):
        @contextmanager
        def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
            assert (title, unit) == ("fetching tiny/llama", "bytes")
            line = [float(total or 0), 0.0]
            lines.append(line)

            def advance(amount: float) -> None:
                line[1] += amount

            yield advance

    hub.add("tiny/llama", repo)
    client.notes = Counted()
    size = sum(int(record["size"]) for record in client.download().files.values())
    client.download()

    assert lines == [[size, size], [size, size]]


def test_the_token_goes_to_the_hub_only(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gated model is fetched with HF_TOKEN; the host that stores the weights never sees it."""
    hub.add("tiny/llama", repo, gated=True, accepted=(TOKEN,))
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    client.download()

    assert {request.authorized for request in hub.requests if request.host == "127.0.0.1"} == {True}
    assert {request.authorized for request in hub.requests if request.host == "localhost"} == {False}


def test_a_damaged_file_in_the_cache_is_fetched_anew(hub: HubServer, repo: Path, client: Client) -> None:
    """A cache is not trusted: a changed byte is found, told and mended."""
    hub.add("tiny/llama", repo)
    client.download()
    weights = client.out / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")  # a hard link: this is the cache's file

    snapshot = client.download()

    assert client.notes.lines == [f"{WEIGHTS} in the cache is damaged; fetching it again."]
    assert differing(client.out, snapshot.files) == []


def test_larger_than_http_allows_is_left_to_the_client(
    hub: HubServer, repo: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 50 GB there is another protocol only; without it the client itself says what to install."""
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.add("tiny/llama", repo)

    with pytest.raises(ValueError, match=r"too large to be downloaded using the regular download method"):
        client.download()


def test_the_expected_shape_is_accepted(hub: HubServer, repo: Path, client: Client) -> None:
    """The configuration describes the model that came."""
    hub.add("tiny/llama", repo)

    client.download(expected_shape=ModelShape.from_hf_config(LLAMA))


def test_another_shape_is_refused_before_the_weights(hub: HubServer, repo: Path, client: Client) -> None:
    """Every field that differs is named, with both values."""
    hub.add("tiny/llama", repo)
    expected = replace(ModelShape.from_hf_config(LLAMA), num_hidden_layers=32, vocab_size=32_000)

    with pytest.raises(UserError, match=r"num_hidden_layers=2, but the configuration expects 32") as caught:
        client.download(expected_shape=expected)

    assert "vocab_size=256, but the configuration expects 32000" in str(caught.value)
    assert hub.bytes_sent(WEIGHTS) == 0


def test_an_unknown_architecture_is_refused_before_the_weights(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """Only config.json was fetched by then."""
    hub.add("tiny/llama", write_model(tmp_path / "bert", architectures=["BertModel"]))

    with pytest.raises(UserError, match=r"config.json of tiny/llama at main names the architecture 'BertModel'"):
        client.download()
    assert hub.bytes_sent(WEIGHTS) == 0


def test_pickles_are_refused(hub: HubServer, repo: Path, client: Client) -> None:
    """A repository without safetensors is not downloaded."""
    (repo / WEIGHTS).unlink()
    hub.add("tiny/llama", repo)

    with pytest.raises(UserError, match=r"only pickled weights \(.*pytorch_model.bin.*Only safetensors are read"):
        client.download()


def test_all_that_is_missing_is_told_at_once(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """A repository that is no model gets one answer, not one after the other."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "README.md").write_text("hello")
    hub.add("tiny/llama", tmp_path / "text")

    with pytest.raises(UserError, match=r"tiny/llama at main has no config.json") as caught:
        client.download()
    assert "neither model.safetensors nor model.safetensors.index.json. It has README.md." in str(caught.value)
    assert "no tokenizer" in str(caught.value)


def test_missing_shards_are_named(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """An upload that was broken off is noticed before gigabytes are fetched."""
    repo = write_model(tmp_path / "sharded", shards=3)
    (repo / "model-00002-of-00003.safetensors").unlink()
    hub.add("tiny/llama", repo)

    with pytest.raises(UserError, match=r"names 1 of 3 shards that are missing: model-00002-of-00003.safetensors"):
        client.download()
    assert hub.bytes_sent("model-00001-of-00003.safetensors") == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json of tiny/llama at main is not valid JSON"),
        ("config.json", "[]", "config.json of tiny/llama at main contains a list"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "a.bin"}}', "names a.bin. Only safetensors are read"),
    ],
)
def test_unusable_json_is_told(
    hub: HubServer, tmp_path: Path, client: Client, name: str, text: str, message: str
) -> None:
    """The file and what is wrong with it."""
    repo = write_model(tmp_path / "sharded", shards=2)
    (repo / name).write_text(text)
    hub.add("tiny/llama", repo)

    with pytest.raises(UserError, match=message):
        client.download()


def test_a_data_set_keeps_its_folders(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """Data files only: scripts and the README stay where they are."""
    commit = hub.add("tiny/data", write_dataset(tmp_path / "data"), repo_type="dataset").commit

    snapshot = download_dataset(HubSource("tiny/data", repo_type="dataset"), client.out, progress=client.notes)

    assert names(client.out) == {"test/part-0.parquet", "dev/part-0.parquet"} == set(snapshot.files)
    assert snapshot.commit == commit
    assert differing(client.out, snapshot.files) == []


def test_a_data_set_without_data_says_what_it_has(hub: HubServer, tmp_path: Path, client: Client) -> None:
    """Both the patterns and some of the files are named; scripts are no data."""
    folder = write_dataset(tmp_path / "data")
    for name in ("test", "dev"):
        shutil.rmtree(folder / name)
    hub.add("tiny/data", folder, repo_type="dataset")
    source = HubSource("tiny/data", repo_type="dataset")

    with pytest.raises(UserError, match=r"no data file that matches \*.parquet, .*\. It has README.md, load.py; "):
        download_dataset(source, client.out, progress=client.notes)


def test_the_librarys_functions_without_a_public_name_are_still_there():
    """Their public counterparts fetch from the start only, and do not say where the cache keeps a file."""
    assert {"url", "temp_file", "resume_size", "headers", "expected_size"} <= set(signature(http_get).parameters)
    assert repo_folder_name(repo_id="google/gemma-2b", repo_type="model") == "models--google--gemma-2b"


def test_questions_that_the_hub_does_not_give_name_the_setting_for_a_copy(client: Client, tmp_path: Path) -> None:
    stage = Download("openai/gsm8k", "main", "dataset", copy_setting="eval.dataset_path")
    with pytest.raises(UserError, match=r"eval\.dataset_path=/copy.* openai/gsm8k .*layout and with the columns"):
        stage.run({}, tmp_path / "out", SilentProgress())


def test_a_model_that_the_hub_does_not_give_names_no_such_setting(client: Client, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny/none") as refused:
        Download("tiny/none", "main").run({}, tmp_path / "out", SilentProgress())
    assert "/copy" not in str(refused.value)
