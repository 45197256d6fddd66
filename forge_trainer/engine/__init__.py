"""Engines: what one rank does. Everything here keeps the `Engine` protocol."""
