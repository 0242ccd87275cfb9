"""Explained prompts that are made by hand, and a reader of pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from cacheblend_rag.observe.explain import Explained
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds, PhaseStarts
from cacheblend_rag.trace import Trace, TracedSelection, TracedTokens

HOSTILE = (
    '<script>alert(1)</script><img src="http://evil.example/x" onerror=alert(2)>'
    "\"'&</mark>\x1b[31m\x00"
)


def explained(text: str = "word", document: str = "notes.txt") -> Explained:
    """A prompt of 12 tokens, each with this text: a hit, a miss, text around them."""
    choice = TracedSelection(
        1, (2, 3, 5), (1.0, 2.0, 3.0), (0.5, 8.0, 2.0), (0.5, 8.0, 2.0), (False, True, True)
    )
    trace = Trace(
        (choice,),
        (4, 4, 2, 2),
        protected=(4,),
        tokens=TracedTokens(3, (3, 5), (1.0, 2.0), (3.0, 4.0)),
    )
    report = BlendReport(
        "transformers", True, None, 12, 2, 2, 8, 0.5, "hkvd", "none", 0.75,
        PhaseSeconds(load=0.1, recompute=0.75, first_token=0.15, decode=4.0),
        chunks=(
            ChunkReport("a" * 32, 2, 4, True, tier="disk", document_id=document, recomputed=2),
            ChunkReport("b" * 32, 7, 3, False, Miss.STORE_ERROR, tier=text, document_id=document),
            ChunkReport("c" * 32, -1, 0, False, Miss.ALTERED_TEXT),
        ),
        selector_reason=Reason(ReasonCode.NO_PRIOR, f"no prior stored for {text}"),
        request_id="0123456789abcdef",
        starts=PhaseStarts(load=0.0, recompute=0.1, first_token=0.85, decode=1.0),
        trace=trace,
    )  # fmt: skip
    return Explained(report, tuple(f" {text}{at}" for at in range(12)), text)


@dataclass
class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    @classmethod
    def of(cls, text: str) -> Page:
        page = cls()
        page.feed(text)
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
