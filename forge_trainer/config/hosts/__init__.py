"""What can be configured of hosts: where they come from, what is asked of schedulers."""
