"""vLLM's processes forked from the tests' own, which starts an engine in a quarter of the time.

On CPUs vLLM has each of them import everything anew, and a class of models that it has not seen yet
be looked at in one more. Servers, which tests start as users do, go on doing that.

With ``TRITON_INTERPRET=1`` engines have what vLLM uses by default on a GPU: asynchronous scheduling
and model runner V2. V2's kernels are in Triton, which has no backend for CPUs: its interpreter runs
them.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from cacheblend_rag.kv.tiers.object_client import ObjectClient

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
GPU_DEFAULTS = os.environ.get("TRITON_INTERPRET") == "1"


class _Driver:
    """Of a Triton backend, which is never used; vLLM asks whether it is active."""

    @staticmethod
    def is_active() -> bool:
        return False


@cache
def fork_engines() -> None:
    """Have every engine that this process opens from now on fork; with one thread, that is safe.

    An engine with an object store is spawned, once this process has used one: its library's threads
    would be missing in a fork.
    """
    if GPU_DEFAULTS:
        from triton.backends import Backend, backends

        backends["cpu"] = Backend(compiler=None, driver=_Driver)
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    decide = CpuPlatform.check_and_update_config

    def decide_to_fork(cls: type[CpuPlatform], config: Any) -> None:
        decide(config)
        config.scheduler_config.async_scheduling = GPU_DEFAULTS
        needs_threads = ObjectClient.used_in and "s3://" in str(config.kv_transfer_config)
        os.environ[START_METHOD] = "spawn" if needs_threads else "fork"

    patch.object(CpuPlatform, decide.__name__, classmethod(decide_to_fork)).start()
    patch.object(registry, "_run_in_subprocess", lambda look: look()).start()
    os.register_at_fork(after_in_child=_use_own_stdout)


def _use_own_stdout() -> None:
    """Undo in the child what tests put in place of stdout: vLLM 0.31 needs its file descriptor."""
    sys.stdout = sys.__stdout__
