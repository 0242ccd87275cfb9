"""Runs one request several ways, and names what is wrong with it, most serious first."""
