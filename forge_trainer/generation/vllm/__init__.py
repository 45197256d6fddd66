"""vLLM behind the `Backend` protocol: an optional extra, and the one place that imports it."""
