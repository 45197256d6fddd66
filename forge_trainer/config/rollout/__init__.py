"""What can be configured of rollouts: the task, its environment, the generators."""
