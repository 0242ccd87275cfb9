"""A connector whose second rank fails in the midst of a layer, once it is told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from cacheblend_rag.blend.stack import Attend
from cacheblend_rag.engines.vllm.connector import CacheBlendConnector

TOLD = "CACHEBLEND_TEST_FAILING"
"""Names, in the environment, the file whose being there is the sign to fail."""


class FailingConnector(CacheBlendConnector):
    """Fails before the ranks add up what their heads have computed."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
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
