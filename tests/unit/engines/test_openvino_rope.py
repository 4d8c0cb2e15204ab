"""Rotary frequencies, plain and scaled."""

from typing import Any

import numpy as np
import pytest

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.rotary import rope_scaling
from pipelines.engines.openvino.rope import attention_factor, inverse_frequencies


def config(**changes: Any) -> CheckpointConfig:
    raw: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 1, "head_size": 8, "vocab_size": 4, "max_position_embeddings": 64,
        "rotary_base": 10000.0,
    }  # fmt: skip
    return CheckpointConfig.parse(raw | changes)


def test_plain_frequencies() -> None:
    """10000^(-2i/8) for i = 0..3: 1, 0.1, 0.01, 0.001."""
    np.testing.assert_allclose(inverse_frequencies(config()), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_divides() -> None:
    scaled = inverse_frequencies(config(rotary_scaling={"type": "linear", "factor": 4.0}))
    np.testing.assert_allclose(scaled, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    """Original context 64 makes 10.2, 1.02, 0.102 and 0.0102 turns; low 1, high 4, factor 8.

    Above 4 turns kept; below 1 divided by 8; 1.0186 turns is 0.0062 of the way from 1 to 4:
    0.1 * (0.0062 + 0.9938 / 8) = 0.013042.
    """
    block = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    block |= {"original_max_position_embeddings": 64}
    np.testing.assert_allclose(
        inverse_frequencies(config(rotary_scaling=block)), [1, 0.013042, 0.00125, 0.000125], rtol=1e-4
    )


def test_an_incomplete_llama3_block_is_refused() -> None:
    with pytest.raises(UserError, match="'llama3' has no 'low_freq_factor'"):
        inverse_frequencies(config(rotary_scaling={"rope_type": "llama3", "factor": 8.0}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 40.0},
        {"truncate": False},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"original_max_position_embeddings": 4096},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"attention_factor": 0.9, "mscale": 0.7, "mscale_all_dim": 1.3},
    ],
)
@pytest.mark.parametrize("size", [8, 128])
def test_yarn_is_that_of_transformers(change: dict[str, Any], size: int) -> None:
    """Frequencies and the factor of queries and keys; Transformers judges."""
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    block = YARN | change
    theirs = transformers.Qwen2Config(
        hidden_size=size, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=4096,
        rope_parameters={**block, "rope_theta": 10000.0},
    )  # fmt: skip
    frequencies, factor = rope.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    written = rope_scaling({"rope_scaling": block})
    ours = config(hidden_size=size, head_size=size, rotary_scaling=written)
    np.testing.assert_allclose(inverse_frequencies(ours), frequencies.numpy(), rtol=1e-6)
    assert attention_factor(ours) == pytest.approx(factor)


def test_other_scalings_leave_queries_as_they_are() -> None:
    assert attention_factor(config()) == attention_factor(config(rotary_scaling={"type": "linear", "factor": 4.0})) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_factor": 1.2}, r"attention_factor=1\.2 and factor=4\.0"),
        ({"original_max_position_embeddings": None}, "'original_max_position_embeddings'|no original_max_position"),
        ({"factor": -1.0}, "factor=-1"),
    ],
)
def test_yarn_that_tensorrt_llm_computes_in_another_way_is_refused(change: dict[str, Any], message: str) -> None:
    block = {key: value for key, value in (YARN | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        inverse_frequencies(config(rotary_scaling=block))


def test_yarn_needs_a_base_above_1() -> None:
    with pytest.raises(UserError, match="rotary_base=1"):
        inverse_frequencies(config(rotary_base=1.0, rotary_scaling=YARN))


def test_partly_rotated_heads_have_fewer_pairs() -> None:
    """4 of 8 channels: 10000^(-2i/4) for i = 0, 1."""
    np.testing.assert_allclose(inverse_frequencies(config(rotary_pct=0.5)), [1, 0.01], rtol=1e-6)


LONG_ROPE = {
    "position_embedding_type": "long_rope", "original_max_position_embeddings": 16,
    "longrope_scaling_short_factors": [1.0, 2.0, 4.0, 5.0], "longrope_scaling_long_factors": [9.0] * 4,
}  # fmt: skip


def test_long_rope_divides_each_pair_and_grows_by_the_contexts() -> None:
    """64 positions of 16: sqrt(1 + ln 4 / ln 16) = sqrt(1.5)."""
    long = config(**LONG_ROPE)
    np.testing.assert_allclose(inverse_frequencies(long), [1, 0.05, 0.0025, 0.0002], rtol=1e-6)
    assert attention_factor(long) == pytest.approx(1.5**0.5)
    assert attention_factor(config(**LONG_ROPE, max_position_embeddings=16)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"longrope_scaling_short_factors": [1.0]}, r"short_factors=\[1\.0\]\. It must be 4 numbers"),
        ({"longrope_scaling_short_factors": None}, "short_factors=None"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings=None"),
    ],
)
def test_an_incomplete_long_rope_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        inverse_frequencies(config(**{**LONG_ROPE, **change}))


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(UserError, match="type 'longrope'"):
        inverse_frequencies(config(rotary_scaling={"rope_type": "longrope"}))
