"""Finds the cheapest settings that keep a model's quality on a user's questions."""
