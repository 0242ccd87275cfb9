"""A server's profile is what its clients use, but for what they set themselves."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, LeadInConfig, Profile, load_tokenizer
from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol.result import ConnectorStatus
from tests.toy import TOY

SERVED = Profile(
    name="served", blend={"selector": "prior", "recompute_ratio": 0.2}, lead_in={"kind": "bos"}
)


class Nowhere:
    """A transport that sends nothing; status: the connector's."""

    name = model_name = "nowhere"
    context_window = 1024

    def __init__(self, status: ConnectorStatus) -> None:
        self.background, self.status = BackgroundLoop("nowhere"), status

    def ask_status(self) -> ConnectorStatus:
        return self.status

    def load_tokenizer(self) -> Any:
        return load_tokenizer(TOY)

    def check_tokenizer(self, tokenizer: Any) -> None: ...

    def close(self) -> None:
        self.background.close()


@pytest.mark.parametrize("profile", [None, SERVED])
def test_a_servers_profile_is_its_clients(profile: Profile | None) -> None:
    status = ConnectorStatus(
        active=True,
        sampling=ResolvedSampling.of_model({}),
        profile=json.dumps(profile.to_dict()) if profile else "",
    )
    with closing(VLLMEngine(Nowhere(status), config=BlendConfig(recompute_ratio=0.5))) as engine:
        assert engine.config.ratio == 0.5
        assert engine.config.selector == ("prior" if profile else BlendConfig().selector)
        assert engine.lead_in.kind == ("bos" if profile else LeadInConfig().kind)
    with closing(VLLMEngine(Nowhere(status), lead_in="document")) as own:
        assert own.lead_in.kind == "document"
        assert own.config.ratio == (0.2 if profile else BlendConfig().ratio)
