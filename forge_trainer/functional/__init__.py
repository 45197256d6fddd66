"""Pure functions: losses, log-probs, advantages, packing, rewards, schedules. No side effects."""
