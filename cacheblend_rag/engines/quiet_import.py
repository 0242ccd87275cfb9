"""Keeps transformers' messages off the terminal."""

from __future__ import annotations


def quiet_libraries() -> None:
    """Import transformers, and keep its progress bars and advice off the terminal."""
    # These import what generates, and what every model does
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
