"""Draw the pictures of the page: ``python -m tests.reference.page_pictures URL``.

URL: of ``cacheblend-rag serve smollm2``. It asks the page's own example. The project's card, for
previews of links, is drawn too: two figures of docs/figures/ttft.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
PICTURES = (("page", 1000, "light"), ("page_720", 720, "dark"), ("page_360", 360, "light"))
"""Names, widths in pixels, and color schemes."""

CARD = """<body style="margin:0;padding:72px 80px;width:1280px;height:640px;box-sizing:border-box;
 background:#12151a;color:#e7eaf0;font:34px/1.4 system-ui,'DejaVu Sans',sans-serif">
<b style="font-size:64px">cacheblend-rag</b><br>Answer RAG questions sooner: each passage's KV cache
is computed once, and reused in every prompt that contains it.
<p style="margin:48px 0 6px;color:#97a1b1">full prefill: first token after {full:.1f} s</p>
<i style="display:block;height:36px;border-radius:8px;background:#97a1b1;width:1000px"></i>
<p style="margin:24px 0 6px;color:#6f9fff">blend: {blend:.1f} s</p>
<i style="display:block;height:36px;border-radius:8px;background:#6f9fff;width:{width:.0f}px"></i>
<p style="margin:28px 0;color:#97a1b1;font-size:26px">{tokens:,} tokens on two CPU cores.
For LlamaIndex, LangChain, transformers and vLLM.</p>
"""


def draw(url: str) -> None:
    """Write the pictures."""
    with sync_playwright() as player:
        browser = player.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, width, scheme in PICTURES:
            size = {"width": width, "height": 900}
            page = browser.new_page(viewport=size, color_scheme=scheme, locale="en")
            page.goto(url)
            page.click("#example")
            page.click("#compare")
            page.wait_for_selector("#prompt:not([hidden])", timeout=300_000)
            page.wait_for_timeout(300)
            page.screenshot(path=FIGURES / f"{name}.png", full_page=True)
        told = json.loads((FIGURES / "ttft.json").read_text())
        full, blend = told["full_seconds"], told["blend_seconds"]
        page = browser.new_page(viewport={"width": 1280, "height": 640})
        shown = {"tokens": told["prompt_tokens"], "width": 1000 * blend / full}
        page.set_content(CARD.format(full=full, blend=blend, **shown))
        page.screenshot(path=FIGURES / "card.png")


if __name__ == "__main__":
    draw(sys.argv[1])
