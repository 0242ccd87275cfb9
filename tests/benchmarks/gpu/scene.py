"""What a step measures on: a device, and the dimensions of a model.

PyTorch is imported when it is first needed: the process of a step begins with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from cacheblend_rag.blend.rows import Rows
    from cacheblend_rag.blend.stack import Geometry
    from tests.benchmarks.shapes import ModelShape

T = TypeVar("T")
Row = dict[str, Any]
"""One measured case: plain values by name. ``failed`` says why a case has no figures."""
Doing = Callable[[str], None]
"""Called with the label of the case that is measured next, for a progress display."""
Measure = Callable[["Scene", Doing], Iterator[Row]]
NO_CUDA = "skipped: no CUDA device"


@dataclass(frozen=True)
class Dimensions:
    """A model's dimensions. name: of the shape that has them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int

    @classmethod
    def of(cls, shape: ModelShape) -> Dimensions:
        """Return the dimensions of a shape."""
        return cls(
            shape.name, shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.intermediate
        )

    @property
    def head_dim(self) -> int:
        """Components of a key."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Scene:
    """The device, and a model's dimensions. is_toy: whether everything is tiny."""

    is_toy: bool
    dimensions: Dimensions

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Scene:
        """Return the scene that ``to_dict`` has described."""
        return cls(plain["is_toy"], Dimensions(**plain["dimensions"]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @property
    def has_cuda(self) -> bool:
        """Whether there is a CUDA device."""
        import torch

        return torch.cuda.is_available()

    @property
    def device(self) -> torch.device:
        """The first CUDA device, or the CPU."""
        import torch

        return torch.device("cuda", 0) if self.has_cuda else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights and KV."""
        import torch

        return torch.bfloat16 if self.has_cuda else torch.float32

    @property
    def geometry(self) -> Geometry:
        """The geometry of the model's KV."""
        from cacheblend_rag.blend.stack import Geometry

        of = self.dimensions
        return Geometry(of.layers, of.heads, of.kv_heads, of.head_dim, self.dtype, self.device)

    def pick(self, real: T, toy: T) -> T:
        """Return the second value if everything is tiny."""
        return toy if self.is_toy else real

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers on the device."""
        import torch

        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def random_rows(self, tokens: int, count: int, seed: int = 0) -> Rows:
        """Return random rows of so many tokens, the last token among them."""
        import numpy as np

        from cacheblend_rag.blend.rows import Rows

        chosen = np.random.default_rng(seed).choice(tokens - 1, count - 1, replace=False)
        return Rows.at(np.append(np.sort(chosen), tokens - 1).astype(np.int64), self.device)

    def shape(self, layers: int | None = None) -> ModelShape:
        """Return the model's shape, with only so many layers if given."""
        from tests.benchmarks.shapes import TOY, named_shape

        shape = TOY if self.is_toy else named_shape(self.dimensions.name)
        return shape if layers is None else replace(shape, layers=layers)
