"""The tensors that the models have beside the reference's where `tensorrt_llm` is this project's own (decision 70)."""

from __future__ import annotations

ONE = {"dtype": "TYPE_UINT64", "dims": [1]}
TWO = {"dtype": "TYPE_UINT64", "dims": [2]}
OWN = {
    "preprocessing": {"outputs": [{"name": "CANCELLATION_KEY", **ONE, "optional": False}]},
    "tensorrt_llm": {
        "inputs": [{"name": "cancellation_key", **ONE, "optional": True}],
        "outputs": [{"name": "cancellation_key", **TWO, "optional": False}],
    },
    "postprocessing": {"inputs": [{"name": "CANCELLATION_KEY", **TWO, "optional": True}]},
}
"""By model, then `inputs` or `outputs`, in the form of the reference."""
