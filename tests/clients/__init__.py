"""What other people's clients get of a server: ``python -m tests.clients`` prints a table."""
