"""The page in a browser: it is drawn, in light and dark, without a request to any network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from cacheblend_rag.observe.explain_page import explain_page
from tests.observe.explained_prompts import HOSTILE, explained

OWN = "not an origin"
"""The origin of the browser's own requests in its log."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def opened(page: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The document as the browser has it once it is drawn, and the addresses that it asked for.

    What the browser asks for itself (updates, the time) has no origin, and finds no host.
    """
    assert CHROMIUM, "the tests need chromium, which is not installed: apt-get install -y chromium"
    log = folder / "net.json"
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-default-apps", "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder}/profile", f"--log-net-log={log}",
            "--net-log-capture-mode=Everything", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    logged = json.loads(log.read_text())
    kinds = {number: name for name, number in logged["constants"]["logEventTypes"].items()}
    jobs = [
        event.get("params", {})
        for event in logged["events"]
        if kinds[event["type"]] == "URL_REQUEST_START_JOB"
    ]
    asked = [job["url"] for job in jobs if job.get("initiator", OWN) != OWN]
    return done.stdout, asked


@pytest.mark.parametrize("text", ["word", HOSTILE], ids=["plain", "hostile"])
def test_the_page_asks_no_network_and_runs_nothing(tmp_path: Path, text: str) -> None:
    page = tmp_path / "explained.html"
    page.write_bytes(explain_page(explained(text)).encode("utf-8", "replace"))
    document, asked = opened(page, tmp_path, "--dump-dom")
    assert document.count("<svg") == 4
    assert "<script" not in document
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_a_request_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "asking.html"
    page.write_text(
        '<img src="http://127.0.0.1:9/asked.png"><link rel=stylesheet href="https://a.example/b.css">'
    )
    _, asked = opened(page, tmp_path, "--dump-dom")
    assert {"http://127.0.0.1:9/asked.png", "https://a.example/b.css"} <= set(asked)


def test_the_page_can_be_drawn_in_light_and_dark(tmp_path: Path) -> None:
    page, shots = tmp_path / "explained.html", []
    page.write_bytes(explain_page(explained()).encode())
    for name, options in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        shot = tmp_path / f"{name}.png"
        opened(page, tmp_path, f"--screenshot={shot}", "--window-size=1200,1600", *options)
        shots.append(shot.read_bytes())
    assert all(shot.startswith(b"\x89PNG") for shot in shots)
    assert shots[0] != shots[1]
