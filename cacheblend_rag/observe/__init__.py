"""Observe: what is here, what is stored, what a request did; it changes nothing."""
