"""The vocabulary file of guided decoding is made from the tokenizer, with the content of TensorRT-LLM's own script."""

import json

import pytest

from pipelines.domain.errors import UserError
from tests.conftest import ROOT
from tests.support.engine_folders import write_engine, write_tokenizer
from triton_repo.config import TritonSettings
from triton_repo.generate import parse
from triton_repo.parameters import RepositorySpec
from triton_repo.write import tokenizer_info, write_repository

MODEL = ROOT / "pipelines" / "bundled" / "models" / "tiny_llama"
GUIDED = TritonSettings(guided_decoding_backend="xgrammar")
GPU = RepositorySpec("tensorrt_llm", "llama", "none")


def test_it_holds_what_transformers_tells_of_the_tokenizer():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    info = tokenizer_info(MODEL)
    assert info["encoded_vocab"] == [token for token, _ in sorted(theirs.get_vocab().items(), key=lambda x: x[1])]
    assert info["stop_token_ids"] == [theirs.convert_tokens_to_ids(config["eos_token"])]
    assert json.loads(info["tokenizer_str"])["model"] == json.loads(theirs.backend_tokenizer.to_str())["model"]


def write(tmp_path, settings, tokenizer, spec=GPU):
    write_repository(
        tmp_path / "repo",
        engine_dir=write_engine(tmp_path / "engine"),
        tokenizer_dir=tokenizer,
        settings=settings,
        spec=spec,
        made_from={},
    )
    config = parse((tmp_path / "repo/tensorrt_llm/config.pbtxt").read_text())
    return tmp_path / "repo", config.parameters["xgrammar_tokenizer_info_path"].string_value


def test_the_repository_holds_it_when_it_is_wanted(tmp_path):
    repo, place = write(tmp_path, GUIDED, MODEL)
    assert json.loads((repo / place).read_text()) == tokenizer_info(MODEL)


def test_a_file_of_the_users_own_is_taken(tmp_path):
    own = TritonSettings(guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path="/info.json")
    repo, place = write(tmp_path, own, write_tokenizer(tmp_path / "model"))
    assert place == "/info.json"
    assert not list(repo.rglob("xgrammar*"))


def test_without_guided_decoding_there_is_none(tmp_path):
    repo, place = write(tmp_path, TritonSettings(), MODEL)
    assert place == ""
    assert not list(repo.rglob("xgrammar*"))


def test_a_tokenizer_without_tokenizer_json_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(UserError, match=r"has no tokenizer\.json, only tokenizer\.model.*xgrammar needs it"):
        write(tmp_path, GUIDED, folder)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="names no end token among its 1769 tokens"):
        tokenizer_info(folder)
