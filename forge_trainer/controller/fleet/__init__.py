"""Several generators that work as one; begin in fleet.py."""

from .fleet import GeneratorFleet

__all__ = ["GeneratorFleet"]
