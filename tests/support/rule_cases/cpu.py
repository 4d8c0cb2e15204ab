"""The CPU engine's window."""

from __future__ import annotations

from tests.support.rule_cases.words import Case, kv

CASES = {
    # sinks fill a block, one block is the last, one lies between them: 96 tokens
    "cpu-windows-are-whole-blocks": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (100,)}},
        r"size=100 with sink_token_length=None .*at least 96.*\[96\]",
        {"triton": {"max_attention_window_size": (96,)}},
    ),
    "cpu-layers-share-a-window": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (128, 256)}},
        r"size=\[128, 256\] cannot be had",
        {"triton": {"max_attention_window_size": (256, 256)}},
    ),
    "cpu-windows-exclude-reuse": Case(
        kv(engine="openvino", triton={"max_attention_window_size": (128,)}),
        r"size=\[128\] with KV-cache reuse cannot",
        {"kv_reuse": False},
    ),
    "cpu-windows-exclude-drafts": Case(
        {"engine": "openvino", "speculation": "draft_target", "triton": {"max_attention_window_size": (128,)}},
        r"size=\[128\] with speculative=draft_target",
        {"speculation": "none"},
    ),
}
