"""The tensors that the models have beside the reference's where `tensorrt_llm` is this project's own (decision 19)."""

ONE = {"dtype": "TYPE_UINT64", "dims": [1]}
TWO = {"dtype": "TYPE_UINT64", "dims": [2]}
OWN = {
    "preprocessing": {"outputs": [{"name": "CANCELLATION_KEY", **ONE, "optional": False}]},
    "tensorrt_llm": {
        "inputs": [
            {"name": "cancellation_key", **ONE, "optional": True},
            {"name": "return_top_log_probs", "dtype": "TYPE_INT32", "dims": [1], "optional": True},
            {"name": "return_context_log_probs", "dtype": "TYPE_INT32", "dims": [1], "optional": True},
        ],
        "outputs": [
            {"name": "cancellation_key", **TWO, "optional": False},
            {"name": "top_token_ids", "dtype": "TYPE_INT32", "dims": [-1, -1], "optional": False},
            {"name": "top_log_probs", "dtype": "TYPE_FP32", "dims": [-1, -1], "optional": False},
            {"name": "context_log_probs", "dtype": "TYPE_FP32", "dims": [-1], "optional": False},
            {"name": "context_top_token_ids", "dtype": "TYPE_INT32", "dims": [-1, -1], "optional": False},
            {"name": "context_top_log_probs", "dtype": "TYPE_FP32", "dims": [-1, -1], "optional": False},
        ],
    },
    "postprocessing": {"inputs": [{"name": "CANCELLATION_KEY", **TWO, "optional": True}]},
}
"""By model, then `inputs` or `outputs`, in the form of the reference."""
