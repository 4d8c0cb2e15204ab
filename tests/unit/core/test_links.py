"""Links in a model's folder are followed inside it and into a Hub cache, nowhere else."""

import re
import shutil
from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.settings.model import BUNDLED
from pipelines.store.manifest import HashCache
from pipelines.store.sources import adapter_source, model_source

MODEL = BUNDLED / "models" / "tiny_llama"


@pytest.fixture
def hashes(tmp_path):
    return HashCache(tmp_path / "hashes.json")


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "chat_template.jinja", "chat_template.json", "added_tokens.json", "config.json", "vocab.json"],
)
def test_a_link_to_a_file_of_the_machine_is_refused(model, hashes, name):
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("/etc/passwd")
    with pytest.raises(
        UserError, match=rf"model\.path='{model}' has links that lead out of it: {name} -> '/etc/passwd'"
    ):
        model_source(model, hashes)


def test_the_plan_refuses_it_and_shows_nothing_of_the_file(model, tmp_path, capsys):
    (model / "chat_template.jinja").symlink_to("/etc/passwd")
    assert main(["plan", f"model.path={model}", f"paths.store={tmp_path}/store"]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert "chat_template.jinja -> '/etc/passwd'" in said
    assert "root:" not in said


def test_a_chain_of_links_and_a_linked_folder_are_followed_to_their_end(model, hashes, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "template.jinja").write_text("x")
    (model / "b.jinja").symlink_to(tmp_path / "outside" / "template.jinja")
    (model / "chat_template.jinja").symlink_to("b.jinja")
    (model / "additional_chat_templates").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError) as caught:
        model_source(model, hashes)
    for name in ("additional_chat_templates", "b.jinja", "chat_template.jinja"):
        assert re.search(rf"{name} -> '{tmp_path}/outside", str(caught.value))


def test_links_inside_the_folder_are_followed(model, hashes):
    (model / "files").mkdir()
    for path in [path for path in model.iterdir() if path.is_file()]:
        path.rename(model / "files" / path.name)
        path.symlink_to(Path("files") / path.name)
    assert model_source(model, hashes)[1].vocab_size == model_source(MODEL, hashes)[1].vocab_size


def hub_cache(root: Path) -> Path:
    """The model as the Hub's client keeps it; returns the snapshot."""
    repository = root / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(MODEL.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064}")
    return snapshot


def test_a_snapshot_of_the_hub_is_followed(hashes, tmp_path):
    snapshot = hub_cache(tmp_path)
    assert model_source(snapshot, hashes)[0].digest == model_source(MODEL, hashes)[0].digest


def test_a_folder_of_links_into_a_hub_cache_is_followed_also_through_a_link_to_it(hashes, tmp_path):
    snapshot = hub_cache(tmp_path)
    (tmp_path / "mine").mkdir()
    for path in snapshot.iterdir():
        (tmp_path / "mine" / path.name).symlink_to(path)
    (tmp_path / "link").symlink_to("mine")
    assert model_source(tmp_path / "link", hashes)[0].digest == model_source(MODEL, hashes)[0].digest


def test_a_folder_that_is_only_called_like_a_cache_is_not_one(model, hashes, tmp_path):
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    (tmp_path / "models--x" / "blobs" / "secret").write_text("{}")
    (model / "added_tokens.json").symlink_to(tmp_path / "models--x" / "blobs" / "secret")
    with pytest.raises(UserError, match=r"added_tokens\.json -> '.*models--x/blobs/secret'"):
        model_source(model, hashes)


def test_a_link_in_a_circle_is_reported_as_unreadable(model, hashes):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json -> 'tokenizer\.json' cannot be read"):
        model_source(model, hashes)


def test_an_adapter_is_looked_at_alike(hashes, tmp_path):
    folder = shutil.copytree(BUNDLED / "adapters" / "in_words", tmp_path / "adapter")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"lora\.adapters\.1='.*adapter' has links .*README\.md -> '/etc/passwd'"):
        adapter_source(folder, hashes, "lora.adapters.1")
