"""Hashes of files, and of a folder against its record."""

from pathlib import Path

import pytest

from pipelines.host.files import CHUNK_BYTES, git_blob_sha1, sha256_file

# Known from the standards: SHA-256 of "abc" (FIPS 180-2), git's empty blob and `echo hello | git hash-object --stdin`.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
HELLO_BLOB = "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one in a subfolder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "abc").write_text("abc")
    (tmp_path / "sub" / "abc").write_text("abc")
    return tmp_path


def test_sha256_is_the_standards(folder: Path) -> None:
    """Three bytes."""
    assert sha256_file(folder / "abc") == ABC


def test_sha256_tells_every_byte(tmp_path: Path) -> None:
    """Two whole blocks and a bit."""
    (tmp_path / "large").write_bytes(bytes(2 * CHUNK_BYTES + 5))
    seen: list[float] = []

    sha256_file(tmp_path / "large", seen.append)

    assert seen == [CHUNK_BYTES, CHUNK_BYTES, 5]


@pytest.mark.parametrize(("text", "name"), [("", EMPTY_BLOB), ("hello\n", HELLO_BLOB)])
def test_git_names_content(tmp_path: Path, text: str, name: str) -> None:
    """As git does."""
    (tmp_path / "file").write_text(text)

    assert git_blob_sha1(tmp_path / "file") == name
