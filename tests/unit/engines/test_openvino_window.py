"""What an attention window means on the CPU engine: whole blocks, one set of sinks, and nothing it cannot keep."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.memory import Eviction, nearest_window
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.rules import cpu
from pipelines.rules.record import judge
from pipelines.rules.rulebook import refused
from tests.support.rule_cases import deployment


def kept(window: int | None = None, sinks: int = 0, *, reuse: bool = False, drafting: bool = False) -> Eviction | None:
    options = OpenVinoOptions(attention_window=window, sink_tokens=sinks, enable_prefix_caching=reuse)
    return options.model_copy(update={"draft_dir": Path("draft") if drafting else None}).eviction(1024)


def test_nothing_is_dropped_without_a_window_or_with_one_that_is_never_full() -> None:
    assert kept() is None
    assert kept(1024, 4, reuse=True) is None


@pytest.mark.parametrize(
    ("window", "sinks", "expected"),
    [(128, 0, Eviction(32, 64, 128)), (128, 4, Eviction(32, 64, 128)), (256, 33, Eviction(64, 160, 256))],
)
def test_sinks_and_recent_tokens_are_whole_blocks(window: int, sinks: int, expected: Eviction) -> None:
    """One block between them is what can be dropped; the sinks are at least one block."""
    assert kept(window, sinks) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"window": 100}, r"max_attention_window_size=100 .*multiple of 32, at least 96.*Set 96"),
        ({"window": 64}, r"max_attention_window_size=64 .*at least 96"),
        ({"window": 128, "sinks": 65}, r"sink_token_length=65 .*at least 160.*Set 160"),
        ({"sinks": 4}, r"sink_token_length=4 needs max_attention_window_size"),
        (
            {"window": 128, "reuse": True},
            r"size=128 together with KV reuse.*block_reuse=false",
        ),
        ({"window": 128, "drafting": True}, r"size=128 together with a draft model"),
    ],
)
def test_what_the_engine_cannot_keep_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        kept(**values)


def test_a_sequence_needs_its_prompt_and_later_only_its_window() -> None:
    """Window 128 is 4 blocks, and one that is being filled: 5. A prompt of 20 blocks is held whole at first."""
    eviction = Eviction(32, 64, 128)
    assert eviction.blocks_at_most(prompt=10, new=1500) == 5
    assert eviction.blocks_at_most(prompt=10, new=50) == 2
    assert eviction.blocks_at_most(prompt=640, new=1000) == 21


@pytest.mark.parametrize("sinks", [0, 4, 33, 65])
@pytest.mark.parametrize("window", [64, 95, 96, 100, 128, 160, 1000])
def test_the_plan_refuses_the_windows_that_the_engine_refuses_and_proposes_the_same(window: int, sinks: int) -> None:
    asked = deployment(
        engine="openvino", triton={"max_attention_window_size": (window,), "sink_token_length": sinks or None}
    )
    planned = [fault.todo for fault in refused(judge(cpu.RULES, asked))]
    works = nearest_window(window, sinks)
    assert kept(works, sinks) is not None
    assert planned == ([] if works == window else [f"Set triton.max_attention_window_size=[{works}]."])
    if works != window:
        with pytest.raises(UserError, match=rf"Set {works}\.$"):
            kept(window, sinks)
