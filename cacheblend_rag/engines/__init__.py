"""Engines: the contract in ``base``, one sibling package an engine."""
