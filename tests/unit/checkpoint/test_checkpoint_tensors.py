"""Reading safetensors files, whole and broken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.tensors import TensorFile, read_header
from pipelines.domain.errors import UserError


def write_raw(path: Path, header: Any, data: bytes) -> Path:
    """Write a file with any header, right or wrong."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    """bf16 0x3F80 is 1.0, E4M3 0x38 is 1.0 and 0x7E is 448, f16 0x3C00 is 1.0."""
    header = {
        "bf16": entry("BF16", [2], 0, 4),
        "fp8": entry("F8_E4M3", [2], 4, 6),
        "f16": entry("F16", [1], 6, 8),
        "i8": entry("I8", [2, 1], 8, 10),
        "u8": entry("U8", [], 10, 11),
        "__metadata__": {"format": "pt"},
    }
    data = bytes([0x80, 0x3F, 0x00, 0xC0, 0x38, 0x7E, 0x00, 0x3C, 0xFF, 0x02, 0x07])
    file = TensorFile(write_raw(tmp_path / "t.safetensors", header, data))
    assert file["bf16"].astype(np.float32).tolist() == [1.0, -2.0]
    assert file["fp8"].astype(np.float32).tolist() == [1.0, 448.0]
    assert file["f16"].tolist() == [1.0]
    assert file["i8"].tolist() == [[-1], [2]]
    assert file["u8"].item() == 7
    assert set(file) == {"bf16", "fp8", "f16", "i8", "u8"}


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    """A 7B checkpoint must not be copied to be looked at, and nobody may write into it."""
    file = TensorFile(write_raw(tmp_path / "t.safetensors", {"a": entry("I8", [3], 0, 3)}, b"\1\2\3"))
    assert not file["a"].flags.owndata
    assert not file["a"].flags.writeable


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank3\.safetensors does not exist"):
        read_header(tmp_path / "rank3.safetensors")


def test_a_file_cut_off_inside_a_tensor_is_refused(tmp_path: Path) -> None:
    """What was expected and what was found are both named."""
    header = {"w": entry("F32", [4], 0, 16)}
    path = write_raw(tmp_path / "t.safetensors", header, bytes(15))
    end = path.stat().st_size + 1
    with pytest.raises(UserError, match=rf"'w' ends at byte {end}, but the file has {end - 1} bytes"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 5, 20])
def test_a_file_cut_off_inside_the_header_is_refused(tmp_path: Path, size: int) -> None:
    path = write_raw(tmp_path / "t.safetensors", {"w": entry("F32", [4], 0, 16)}, bytes(16))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=rf"damaged or truncated.*the file has {size} bytes"):
        read_header(path)


def test_a_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "t.safetensors", b"not json", b"")
    with pytest.raises(UserError, match=r"t\.safetensors is damaged.*not valid JSON"):
        read_header(path)


def test_a_header_that_is_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a list, not an object"):
        read_header(write_raw(tmp_path / "t.safetensors", [], b""))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry("F32", [4], 0, 12), r"'w' F32\[4\] needs 16 bytes, but its entry has 12"),
        (entry("F32", [-4], 16, 0), r"'w' F32\[-4\] needs -16 bytes"),
        (entry("F32", [4], -16, 0), r"'w' F32\[4\] needs 16 bytes"),
        ({"dtype": "F32"}, r"the header entry of 'w' is \{'dtype': 'F32'\}"),
        (entry("F3", [4], 0, 16), "'w' with dtype F3, which is not supported"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_header(write_raw(tmp_path / "t.safetensors", {"w": wrong}, bytes(16)))
