"""Losses over selected-token log-probs, and the terms that any of them can add."""
