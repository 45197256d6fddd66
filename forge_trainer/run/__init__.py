"""A run from first to last: rollout, pipeline, training, weight sync, and its folder."""
