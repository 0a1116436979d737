"""Redline pre-trains transformer language models and accounts for every FLOP it could not use."""

__version__ = "0.1.0"
