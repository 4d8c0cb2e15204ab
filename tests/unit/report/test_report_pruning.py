"""What report and model card say of a pruned model."""

from pipelines.report.checkpoints import pruning_terms

COUNTED = {
    "calibration": {"sequences": 64, "tokens": 7614},
    "parameters_before": 4065536,
    "parameters_after": 3278592,
    "source_bytes": 8135248,
    "total_bytes": 6560392,
}
SIZES = {"layers": 4, "mlp": 768, "heads": 4, "kv_heads": 2}


def test_width_names_the_sizes_and_the_weakest_layer():
    shares = {"mlp": [0.98, 0.95], "heads": [0.51, 0.62]}
    terms = dict(
        pruning_terms(
            {
                **COUNTED,
                "method": "width",
                "sizes_before": SIZES,
                "sizes_after": SIZES | {"mlp": 512, "heads": 2},
                "importance_kept": shares,
            }
        )
    )
    assert terms["Pruned"] == "width: 768 -> 512 MLP channels, 4 -> 2 query heads"
    assert terms["Parameters"] == "4,065,536 before, 3,278,592 after (80.6 %)"
    assert "at least 51.0 % of query heads, 95.0 % of MLP channels" in str(terms)


def test_depth_names_the_layers_in_the_order_in_which_they_were_dropped():
    terms = dict(
        pruning_terms(
            {
                **COUNTED,
                "method": "depth",
                "sizes_before": SIZES,
                "sizes_after": SIZES | {"layers": 2},
                "loss_before": 0.5688,
                "dropped": [1, 2],
                "losses": [0.6913, 1.25],
            }
        )
    )
    assert terms["Pruned"] == "depth: 4 -> 2 layers"
    lost = terms["Loss on these texts"]
    assert lost == "0.5688 before; then 0.6913 without layer 1, 1.25 without layer 2 (nats per token)"
    assert terms["Judged on"] == "7,614 tokens in 64 texts"
