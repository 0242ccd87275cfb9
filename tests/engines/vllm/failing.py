"""A connector whose ranks weigh loading differently, and whose second one fails once told to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from cacheblend_rag.blend.stack import Attend
from cacheblend_rag.engines.vllm.connector import CacheBlendConnector
from cacheblend_rag.prefill import policy
from cacheblend_rag.prefill.policy import Controller, Decision
from cacheblend_rag.reason import Reason, ReasonCode

TOLD = "CACHEBLEND_TEST_FAILING"
"""Names, in the environment, the file whose being there is the sign to fail."""


WEIGHED = Reason(ReasonCode.SLOW, "weighed")
GIVEN_UP_BY = {0: 0.1, 1: 0.2}
"""The ratio at which each rank alone would rather prefill."""
DECIDE = Controller.decide


def decide_by_rank(self: Controller, *given: Any, held: int) -> Decision:
    """Each rank gives up at a ratio of its own."""
    decided = DECIDE(self, *given, held=held)
    gives_up = given[-1].ratio == GIVEN_UP_BY[get_tensor_model_parallel_rank()]
    return replace(decided, load=(), why=WEIGHED) if gives_up else decided


class FailingConnector(CacheBlendConnector):
    """Fails before the ranks add up what their heads have computed.

    It is what changes a rank's process, since a process that is spawned has no patches of a test.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        patch.object(policy, "MARGIN", 1e9).start()  # as tests/conftest.py does in its process
        patch.object(Controller, "decide", decide_by_rank).start()
        assert self.worker.blender is not None
        if get_tensor_model_parallel_rank() == 1:
            stack = self.worker.blender.stack
            run_layer = stack.run_layer

            def fails(layer: int, hidden: Any, inputs: Any, attend: Attend) -> Any:
                def attend_or_fail(call: Any) -> Any:
                    if layer == 2 and Path(os.environ[TOLD]).exists():
                        raise RuntimeError("this rank was told to fail")
                    return attend(call)

                return run_layer(layer, hidden, inputs, attend_or_fail)

            stack.run_layer = fails  # type: ignore[method-assign]
