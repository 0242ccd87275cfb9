"""Switches off the cuDNN backend of PyTorch's attention.

From PyTorch 2.11 on, attention with a mask uses cuDNN on Hopper and Blackwell GPUs. cuDNN compiles
a plan for each new shape (about 0.4 s), and with fewer than 8 KV heads it was reported to compute
wrong results (pytorch issue 193893). The backend switch is process-wide, and PyTorch's own context
manager for it is not thread-safe: the thread that leaves last may restore another one's temporary
setting. So users are counted here: the first one switches cuDNN off, the last one restores the
original setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch.backends import cuda

_lock = Lock()
_users = 0
_was_enabled = False


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep `scaled_dot_product_attention` off cuDNN; safe to nest and to use in several threads."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _was_enabled  # noqa: PLW0603 - the setting is the process's, too
    with _lock:
        if not _users:
            _was_enabled = bool(cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
            cuda.enable_cudnn_sdp(False)
        _users += 1


def _leave() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if not _users:
            cuda.enable_cudnn_sdp(_was_enabled)
