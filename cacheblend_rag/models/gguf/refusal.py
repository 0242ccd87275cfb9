"""The error for GGUF files that cannot be converted."""

HUB_FORMAT = "give the model's folder in hub format instead"


class CannotConvertError(Exception):
    """A GGUF file cannot be converted; the message says why and what to do, but not which file."""
