"""The transport of an engine inside a vLLM server: over the server's own engine client."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.engines.background import GivenLoop
from cacheblend_rag.engines.vllm.in_process import InProcessVLLM
from cacheblend_rag.engines.vllm.namespaces import with_namespace
from cacheblend_rag.engines.vllm.transport import Transport, VLLMRequest
from cacheblend_rag.models import public_name


class OwnClient(InProcessVLLM):
    """Sends requests to the vLLM of the server that this process is; closing it ends nothing else.

    Make it in the server's event loop.
    """

    def __init__(self, client: Any, model: str, namespace: str | None) -> None:
        """Use a server's engine client.

        Args:
            client: vLLM's EngineClient, as endpoint plugins and ``app.state`` have it.
            model: the name or the folder that vLLM was started with.
            namespace: of all requests from here, where keys decide it; else None.
        """
        Transport.__init__(self)
        self.vllm, self._model, self.model_name = client, model, public_name(model)
        self._namespace = namespace
        self.background = GivenLoop()
        self.context_window = int(client.model_config.max_model_len)

    def _parameters(self, request: VLLMRequest) -> Any:
        parameters = super()._parameters(request)
        if self._namespace is None:
            return parameters
        return with_namespace(parameters, self._namespace)

    async def _stop(self) -> None:
        """Leave the server as it is."""
