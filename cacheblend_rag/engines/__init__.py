"""Engines: the contract in ``base``, and one package per engine."""
