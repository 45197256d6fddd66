"""Tasks to act in: renderer, limits, rewards, and the rollout of one episode."""
