"""The page at ``/``, in a browser without a head: it asks, streams, stops, and shows errors."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from cacheblend_rag import TransformersEngine
from cacheblend_rag.api.app import create_app
from cacheblend_rag.api.collection import Retriever
from cacheblend_rag.api.page import FILES
from cacheblend_rag.rag.answering import Asker
from tests.api.scripted import ScriptedEngine
from tests.api.test_over_http import listening
from tests.cli.conftest import indexed, one_thread  # noqa: F401 - fixtures
from tests.contracts.engine import CONFIG, embedded_model, tokenizer_with_template
from tests.models import words

PASSAGES = "\n\n".join(words(60, seed) for seed in range(3))
HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"> "
    "</span></div>" + "w" * 3000 + " \u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd"
)
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as player:
        chromium = shutil.which("chromium")  # Debian's: playwright's own is not installed
        yield player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "CACHEBLEND_STORE_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """A page of a narrow screen, on which nothing may fail, and no other host is asked."""
    with closing(browser.new_context(viewport={"width": 360, "height": 800})) as context:
        page, failed, hosts = context.new_page(), [], set()
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.on("request", lambda asked: hosts.add(httpx.URL(asked.url).host))
        page.set_default_timeout(20_000)
        yield page
        assert not failed
        assert hosts <= {"127.0.0.1"}


@pytest.fixture(scope="module")
def blending() -> Iterator[str]:
    """The URL of a server that blends."""
    engine = TransformersEngine(
        embedded_model(), tokenizer=tokenizer_with_template(), config=CONFIG
    )
    with closing(engine), listening(create_app(engine, name="<b>toy</b>")) as url:
        yield url


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    """An engine that answers what a test says, and its server's URL."""
    with closing(ScriptedEngine()) as engine, listening(create_app(engine)) as url:
        yield engine, url


def ask(page: Page, url: str, passages: str = PASSAGES, question: str = "w3 w4") -> None:
    page.goto(url)
    page.fill("#passages", passages)
    page.fill("#question", question)
    page.keyboard.press("Enter")


def is_narrow(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_its_files_need_no_key_and_may_load_nothing_else(
    monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    with closing(ScriptedEngine()) as engine, listening(create_app(engine)) as url:
        for path in FILES:
            answer = httpx.get(f"{url}/{path}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith(POLICY)
        ask(page, url)
        expect(page.locator("#error")).to_have_text("a key is needed (Bearer)")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#keys")).to_be_hidden()
        page.press("#question", "Enter")
        expect(page.locator("#status")).to_have_text("Done.")
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0


def test_both_answers_are_drawn_with_their_phases_and_tokens(page: Page, blending: str) -> None:
    ask(page, blending)
    expect(page.locator("#status")).to_have_text("Done.")
    expect(page.locator("#model")).to_have_text("<b>toy</b>")
    expect(page.locator("#verdict")).to_contain_text("x sooner.")
    assert page.locator("#full .track").count() >= 2
    assert page.locator("#blend .track").count() > page.locator("#full .track").count()
    told = [int(page.inner_text(f".legend .{one} b")) for one in ("reused", "recomputed")]
    assert told[0] > 100
    assert told[1] > 0
    parts = page.locator(".part.hit")
    assert parts.count() == 3
    assert parts.nth(0).get_attribute("title").startswith("reused from host")
    assert "".join(parts.nth(0).locator("span.reused, span.recomputed").all_inner_texts())
    expect(page.locator("#tiers tbody tr td").first).to_have_text("host")
    expect(page.locator("#tiers tbody tr td").nth(1)).to_have_text("3")
    assert is_narrow(page)


def test_a_collection_is_asked_by_the_keyboard_and_its_sources_are_drawn(
    page: Page,
    indexed: Any,  # noqa: F811
) -> None:
    folder, asked = indexed
    with Asker(folder) as asker:
        app = create_app(asker.engine, retriever=Retriever(asker, top_k=2), documents=False)
        with listening(app) as url:
            page.goto(url)
            expect(page.locator("#passages")).to_be_hidden()
            page.focus("#from input")
            page.keyboard.press("Tab")
            page.keyboard.type(asked[0].question)
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            expect(page.locator("#status")).to_have_text("Done.")
            assert page.locator("#sources li").count() == 2
            page.locator("#sources summary").first.press("Enter")
            expect(page.locator("#sources p").first).to_be_visible()
            page.check("[value=passages]")
            expect(page.locator("#passages")).to_be_visible()


def test_a_passage_that_is_not_blended_says_why(page: Page, blending: str) -> None:
    page.goto(blending)
    page.route(
        "**/v1/cacheblend/documents/**",
        lambda route: route.fulfill(
            status=403, json={"error": {"message": "the key for storing is needed"}}
        ),
    )
    page.fill("#passages", words(60, 70))
    page.fill("#question", "w3 w4")
    page.click("#compare")
    expect(page.locator("#status")).to_have_text("Done.")
    expect(page.locator("#error")).to_contain_text("the key for storing is needed")
    expect(page.locator("#verdict")).to_contain_text("Nothing was blended")
    expect(page.locator("#summary")).to_contain_text("no known chunk in the prompt")


def test_a_hostile_passage_stays_text(page: Page, scripted: tuple[ScriptedEngine, str]) -> None:
    engine, url = scripted
    engine.script.pieces = (HOSTILE,)
    ask(page, url, HOSTILE, HOSTILE[:200])
    expect(page.locator("#status")).to_have_text("Done.")
    expect(page.locator("#full .answer")).to_have_text(HOSTILE)
    assert page.title() == "cacheblend-rag"
    assert page.locator("img, main script, .answer *").count() == 0
    assert is_narrow(page)


def test_it_streams_stops_and_asks_again(page: Page, scripted: tuple[ScriptedEngine, str]) -> None:
    engine, url = scripted
    engine.script.may_go_on = threading.Event()
    ask(page, url)
    expect(page.locator(".answer", has_text="Hello")).to_have_count(1)
    expect(page.locator("#compare")).to_be_disabled()
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert engine.script.cancelled.wait(10)
    engine.script.may_go_on.set()
    page.press("#question", "Enter")
    expect(page.locator("#status")).to_have_text("Done.")
    expect(page.locator("#verdict")).to_contain_text("Both answers are the same.")


@pytest.mark.parametrize("pieces", [(), ("Hello",)])
def test_an_error_is_told(
    page: Page, scripted: tuple[ScriptedEngine, str], pieces: tuple[str, ...]
) -> None:
    engine, url = scripted
    engine.script.pieces, engine.script.error = pieces, RuntimeError("a secret")
    ask(page, url)
    expect(page.locator("#error")).to_have_text("the server failed; its log says why")
    expect(page.locator("#compare")).to_be_enabled()


def test_it_speaks_chinese(page: Page, scripted: tuple[ScriptedEngine, str]) -> None:
    page.goto(scripted[1])
    page.click("#language")
    expect(page.locator("#compare")).to_have_text("\u6bd4\u8f83")
    missing = """async () => { const { WORDS: { en, zh } } = await import("/words.js");
        return Object.keys(en).filter((name) => !zh[name]); }"""
    assert page.evaluate(missing) == []
