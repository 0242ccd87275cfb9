"""The base of benchmark plans: dataclasses whose fields are also command-line options.

PyTorch is not imported before a plan is made, so that the command line starts quickly.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cacheblend_rag.bench.shapes import ModelShape


def option(
    default: Any, help: str, *, flag: str = "", least: float | None = None, comma: bool = False
) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: the field's default; REQUIRED if there is none.
        help: the option's help text.
        flag: the option's name, ``--`` and the field's name by default. A field that is a tuple
            takes one value each time its option is given.
        least: the smallest value allowed.
        comma: whether the option takes a tuple of layer indices, separated by commas.
    """
    return field(
        default=default, metadata={"help": help, "flag": flag, "least": least, "comma": comma}
    )


DEFAULT_SHAPE = "smollm2-135m"
SHAPES_HELP = "smollm2-135m, smollm2-360m, qwen2.5-0.5b, llama-3.2-1b, mistral-7b, llama-3.1-8b."
REQUIRED: Any = MISSING
"""The default of an option that must be given."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a benchmark. Raises ConfigError for a value below its field's least."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata.get("least")
            if least is not None and value is not None and not value >= least:
                raise ConfigError(f"{one.name}={value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class ModelPlan(Plan):
    """A benchmark on a model with random weights.

    shape: a name in `SHAPES`, with the model's dimensions. dtype, device: of its weights.
    """

    shape: str = option(DEFAULT_SHAPE, SHAPES_HELP)
    dtype: str = option("float32", "float32, bfloat16 or float16.")
    device: str = option("cpu", "cpu, cuda, mps, ...; vLLM runs on what it was built for.")

    @cached_property
    def model_shape(self) -> ModelShape:
        """The model's dimensions; raises ConfigError for an unknown name."""
        from cacheblend_rag.bench.shapes import named_shape

        return named_shape(self.shape or DEFAULT_SHAPE)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The data type called ``dtype``; raises ConfigError for an unknown name."""
        from cacheblend_rag.engines.transformers.loading import named_dtype

        return named_dtype(self.dtype)

    @cached_property
    def torch_device(self) -> torch.device:
        """The device called ``device``; raises ConfigError if it is not available."""
        from cacheblend_rag.engines.transformers.loading import pick_device

        return pick_device(self.device)
