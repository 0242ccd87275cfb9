"""Verifies a model before it is put into production: a page of checks, and a verdict."""
