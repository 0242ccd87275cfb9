"""Both answers to a chat, as events."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.asyncio
CHAT = {"messages": [{"role": "user", "content": "w3 w4"}], "max_tokens": 3}


async def test_the_sides_take_turns_and_full_prefill_is_full(http, caplog):
    caplog.set_level("INFO", "cacheblend_rag.api")
    firsts = []
    for _ in range(2):
        answer = await http.post("/v1/compare", json=CHAT)
        told = [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one]
        firsts.append(told[0]["side"])
        reports = {one["side"]: one["report"] for one in told if "report" in one}
        assert list(reports) == [firsts[-1], *({"full", "blend"} - {firsts[-1]})]
        assert reports["full"]["reason_code"] == "full_prefill_asked"
        assert set(told[-1]) == {"tokens", "explanation", "sources"}
    assert sorted(firsts) == ["blend", "full"]
    assert sum("POST /v1/compare" in line for line in caplog.messages) == 4


@pytest.mark.parametrize(("param", "value"), [("n", 2), ("model", "other"), ("messages", [])])
async def test_a_wrong_field_is_named_before_any_work(http, script, param, value):
    answer = await http.post("/v1/compare", json={**CHAT, param: value})
    assert answer.status_code in {400, 404}
    assert answer.json()["error"]["param"] == param
    assert not script.prompts
