"""Saving and loading one rank's state: folders, staging, export, random state."""
