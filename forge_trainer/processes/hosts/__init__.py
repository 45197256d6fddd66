"""Hosts of a run: where they come from, what they have, who gets what on them."""
