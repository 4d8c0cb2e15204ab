"""Merging rank files into full-model tensors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint, split_axis
from pipelines.domain.errors import UserError

Write = Callable[..., Path]


TP2 = {"world_size": 2, "tp_size": 2, "pp_size": 1}
QKV = "transformer.layers.0.attention.qkv.weight"
DENSE = "transformer.layers.0.attention.dense"


def rows(*values: int) -> np.ndarray:
    """One row per value, all of its 4 columns the same."""
    return np.repeat(np.array(values, dtype=np.int8)[:, None], 4, axis=1)


def read(folder_of: Write, ranks: list[dict[str, np.ndarray]], name: str, **changes: object) -> list[int]:
    """Write, open, merge one tensor; return its first column."""
    merged = Checkpoint(folder_of(ranks, **changes)).tensor(name)
    return merged.reshape(merged.shape[0], -1)[:, 0].tolist()


def test_one_rank_is_not_copied(write_checkpoint: Write) -> None:
    checkpoint = Checkpoint(write_checkpoint([{QKV: rows(*range(12))}]))
    assert not checkpoint.tensor(QKV).flags.owndata


def test_qkv_of_two_ranks_is_put_back_in_order(write_checkpoint: Write) -> None:
    """Rank r holds q | k | v of its own head (2 rows each): 10 11 | 20 21 | 30 31 and 12 13 | 22 23 | 32 33."""
    ranks = [{QKV: rows(10, 11, 20, 21, 30, 31)}, {QKV: rows(12, 13, 22, 23, 32, 33)}]
    assert read(write_checkpoint, ranks, QKV, mapping=TP2) == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]


def test_repeated_kv_heads_are_taken_once(write_checkpoint: Write) -> None:
    """One KV head over two ranks: both hold the same k and v."""
    ranks = [{QKV: rows(10, 11, 20, 21, 30, 31)}, {QKV: rows(12, 13, 20, 21, 30, 31)}]
    merged = read(write_checkpoint, ranks, QKV, mapping=TP2, num_key_value_heads=1)
    assert merged == [10, 11, 12, 13, 20, 21, 30, 31]


def test_packed_qkv_merges_by_byte_rows(write_checkpoint: Write) -> None:
    """INT4 has two output channels per byte row, so a head of 2 is one row."""
    ranks = [{QKV: rows(10, 20, 30)}, {QKV: rows(12, 22, 32)}]
    assert read(write_checkpoint, ranks, QKV, mapping=TP2) == [10, 12, 20, 22, 30, 32]


def test_input_split_linears_merge_on_the_input(write_checkpoint: Write) -> None:
    """Dense [4, 4] is split into two [4, 2]; its group scales follow, its per-tensor scale does not."""
    whole = np.arange(16, dtype=np.int8).reshape(4, 4)
    scale = np.array([0.5], dtype=np.float32)
    parts = [
        {f"{DENSE}.weight": whole[:, half], f"{DENSE}.prequant_scaling_factor": whole[0, half],
         f"{DENSE}.weights_scaling_factor": whole[:, half], f"{DENSE}.activation_scaling_factor": scale}
        for half in (slice(0, 2), slice(2, 4))
    ]  # fmt: skip
    checkpoint = Checkpoint(write_checkpoint(parts, mapping=TP2))
    for leaf, expected in (("weight", whole), ("weights_scaling_factor", whole), ("prequant_scaling_factor", whole[0])):
        np.testing.assert_array_equal(checkpoint.tensor(f"{DENSE}.{leaf}"), expected)
    assert checkpoint.tensor(f"{DENSE}.activation_scaling_factor").tolist() == [0.5]


def test_zero_points_merge_the_other_way_round_than_scales(write_checkpoint: Write) -> None:
    """They are [G, O]: those of qkv are q | k | v of each rank in columns, those of dense split with the input."""
    qkv, dense = QKV.replace("weight", "zero"), f"{DENSE}.zero"
    ranks = [
        {qkv: np.array([[10, 20, 30]], np.int8), dense: np.array([[1, 2]], np.int8)},
        {qkv: np.array([[12, 22, 32]], np.int8), dense: np.array([[3, 4]], np.int8)},
    ]
    checkpoint = Checkpoint(write_checkpoint(ranks, mapping=TP2))
    assert checkpoint.tensor(qkv).tolist() == [[10, 12, 20, 22, 30, 32]]
    assert checkpoint.tensor(dense).tolist() == [[1, 2], [3, 4]]


def test_padded_vocabulary_is_cut(write_checkpoint: Write) -> None:
    """6 rows over 4 ranks are padded to 8 by the exporter; the two rows of zeros go again."""
    name, mapping = "lm_head.weight", {"world_size": 4, "tp_size": 4, "pp_size": 1}
    ranks = [{name: rows(*pair), QKV: rows(1, 1, 1, 1, 1, 1)} for pair in ((1, 2), (3, 4), (5, 6), (0, 0))]
    merged = read(write_checkpoint, ranks, name, mapping=mapping, num_attention_heads=4, num_key_value_heads=4)
    assert merged == [1, 2, 3, 4, 5, 6]


def test_pipeline_stages_are_renumbered(write_checkpoint: Write) -> None:
    """Stage 1 calls its layers 0 and 1; they are 2 and 3 of the model."""
    name = "transformer.layers.{}.mlp.fc.weight"
    ranks = [{name.format(0): rows(10), name.format(1): rows(11)}, {name.format(0): rows(12), name.format(1): rows(13)}]
    mapping = {"world_size": 2, "tp_size": 1, "pp_size": 2}
    checkpoint = Checkpoint(write_checkpoint(ranks, mapping=mapping, num_hidden_layers=4))
    assert [checkpoint.tensor(name.format(i))[0, 0] for i in range(4)] == [10, 11, 12, 13]


def test_missing_layers_are_counted(write_checkpoint: Write) -> None:
    with pytest.raises(UserError, match=r"has 1 layers; its config\.json says 3"):
        Checkpoint(write_checkpoint([{QKV: rows(*range(12))}], num_hidden_layers=3))


def test_a_missing_rank_file_is_named(write_checkpoint: Write) -> None:
    with pytest.raises(UserError, match=r"rank1\.safetensors does not exist"):
        Checkpoint(write_checkpoint([{QKV: rows(*range(6))}], mapping=TP2))


def test_a_missing_tensor_is_named(write_checkpoint: Write) -> None:
    checkpoint = Checkpoint(write_checkpoint([{QKV: rows(*range(12))}]))
    with pytest.raises(UserError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight")


def test_ranks_of_different_exports_are_refused(write_checkpoint: Write) -> None:
    with pytest.raises(UserError, match=r"different tensors: 'lm_head\.weight'"):
        Checkpoint(write_checkpoint([{QKV: rows(1)}, {QKV: rows(1), "lm_head.weight": rows(1)}], mapping=TP2))


def test_a_shared_scale_that_differs_is_refused(write_checkpoint: Write) -> None:
    name = f"{DENSE}.activation_scaling_factor"
    ranks = [{name: np.array([value], dtype=np.float32)} for value in (0.5, 0.25)]
    checkpoint = Checkpoint(write_checkpoint(ranks, mapping=TP2))
    with pytest.raises(UserError, match=rf"'{name}' differs between tensor-parallel ranks 0 and 1"):
        checkpoint.tensor(name)


@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("transformer.layers.0.mlp.fc.weights_scaling_factor", (4,), 0),
        ("transformer.layers.0.mlp.fc.weights_scaling_factor", (1,), None),
        ("transformer.layers.0.mlp.fc.prequant_scaling_factor", (4,), None),
        ("transformer.layers.0.mlp.proj.weights_scaling_factor", (4,), None),
        ("transformer.layers.0.mlp.proj.weights_scaling_factor", (4, 2), 1),
        ("transformer.layers.0.mlp.proj.per_channel_scale", (4,), None),
        ("transformer.layers.0.input_layernorm.weight", (4,), None),
        ("transformer.vocab_embedding.weight", (6, 4), 0),
    ],
)
def test_what_is_split_and_where(name: str, shape: tuple[int, ...], axis: int | None) -> None:
    """SmoothQuant's scale of an input-split linear is per output channel, so every rank has all of it."""
    assert split_axis(name, shape) == axis
