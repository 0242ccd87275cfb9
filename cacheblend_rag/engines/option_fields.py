"""A store's settings as fields of a pydantic model, as the frameworks' components are.

pydantic comes with the frameworks; this package does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import StoreConfig


def store_fields(told: Collection[str]) -> dict[str, Any]:
    """Return StoreConfig's fields, for ``pydantic.create_model``.

    Args:
        told: the names that are serialized and shown. The others may hold what is nobody's
            business, or are no matter elsewhere.
    """
    kinds = get_type_hints(StoreConfig)
    return {
        one.name: (
            _as_read_by_the_store(one.name, kinds[one.name]),
            Field(
                default=one.default,
                description=f"The store's {one.name}, as in StoreConfig.",
                exclude=one.name not in told,
                repr=one.name in told,
            ),
        )
        for one in fields(StoreConfig)
    }


def _as_read_by_the_store(name: str, kind: Any) -> Any:
    is_number = not {int, float}.isdisjoint(get_args(kind) or (kind,))
    bounded = Annotated[kind, Field(ge=0)] if is_number else kind
    return Annotated[bounded, WrapValidator(_reader(name))]


def _reader(name: str) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Return what reads a field as StoreConfig does, and refuses it in pydantic's words."""

    def read(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return getattr(StoreConfig(**{name: value}), name)
        except ConfigError:
            validate(value)
            raise

    return read
