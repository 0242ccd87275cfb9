"""Diagnoses models, devices and servers, and interprets reports; changes nothing."""
