"""Published benchmark results, and predictions for them."""
