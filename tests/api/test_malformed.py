"""A check of a body ends at its first error."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from cacheblend_rag.api import errors
from cacheblend_rag.api.app import create_app
from tests.api.scripted import ScriptedEngine

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w3"}]},
    "/v1/completions": {"prompt": "w3"},
    "/v1/responses": {"input": "w3"},
}
BODIES_OF_MANY = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 20_000}]}),
    ("/v1/chat/completions", {"messages": [1] * 8000}),
    ("/v1/chat/completions", {"stop": [1] * 20_000}),
    ("/v1/completions", {"prompt": [1.5] * 20_000}),
    ("/v1/completions", {"prompt": [["a"]] * 20_000}),
    ("/v1/responses", {"include": [1] * 20_000}),
    ("/v1/responses", {"metadata": {str(index): 1 for index in range(20_000)}}),
]


@pytest.mark.parametrize(("path", "more"), BODIES_OF_MANY)
def test_a_check_ends_at_the_first_error(path, more, monkeypatch):
    """An error an entry would take seconds of the event loop, and gigabytes."""
    told, counted = errors.of_validation, []

    def count(problems):
        counted.append(len(problems))
        return told(problems)

    monkeypatch.setattr(errors, "of_validation", count)
    with TestClient(create_app(ScriptedEngine()), base_url="http://localhost") as client:
        answer = client.post(path, json={**BODIES[path], **more})
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["param"]
    assert counted[0] < 10
