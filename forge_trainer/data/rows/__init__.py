"""Rows of files, each read when it is asked for. What their columns mean is not known here."""

from .protocol import Layout, Rows, one_by_one

__all__ = ["Layout", "Rows", "one_by_one"]
