"""Draw the pictures of the page in docs: ``python -m tests.reference.page_pictures URL``.

URL: of ``cacheblend-rag serve smollm2``. It asks the page's own example.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
PICTURES = (("page", 1000, "light"), ("page_720", 720, "dark"), ("page_360", 360, "light"))
"""Names, widths in pixels, and color schemes."""


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


if __name__ == "__main__":
    draw(sys.argv[1])
