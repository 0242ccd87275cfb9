"""Extracts text from files in a separate process, started as ``python -m`` this module.

Documents are untrusted: a hostile one can make its parser take hours or all memory, or crash. So
parsers run outside of the indexing process, which kills them when they take too long (see
``readers.FileReader``). Paths come in as JSON strings, one per line; each is answered by one line,
a JSON object with ``text``, ``problem`` or ``missing`` (a library).
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

MAX_FILE_BYTES = 256 << 20
MAX_CHARACTERS = 32 << 20
MAX_PAGES = 20_000
MAX_MEMORY_BYTES = 2 << 30

PARAGRAPH = "\n\n"
UNSEEN_TAGS = frozenset({"script", "style", "noscript", "template", "svg", "iframe"})
BEFORE_TAGS = {
    **dict.fromkeys(("br", "li", "tr", "dt", "dd", "option"), "\n"),
    **dict.fromkeys(("td", "th"), " "),
}
BLOCK_TAGS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "caption", "details", "div", "dl"}
    | {"fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6"}
    | {"head", "header", "hr", "main", "nav", "ol", "p", "pre", "section", "select", "summary"}
    | {"table", "title", "ul"}
)
VOID_TAGS = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track"}
    | {"wbr"}
)


class ProblemError(Exception):
    """A file holds no text that can be read; the message says why, without the file's name."""


def extract(path: Path) -> str:
    """Return a file's text, with line feeds for line breaks.

    Raises ProblemError if a limit is exceeded or there is no text, ImportError if a library is
    missing, and any error of a parser.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ProblemError(f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    text = EXTRACTORS[path.suffix.lower()](path)
    if len(text) > MAX_CHARACTERS:
        raise ProblemError(f"holds more than {MAX_CHARACTERS} characters")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\x00", "")
    # PDF fonts can map to unpaired surrogates, which no tokenizer takes.
    text = text.encode("utf-8", "replace").decode("utf-8").strip()
    if not text:
        raise ProblemError("holds no text")
    return text


def _plain(path: Path) -> str:
    """Return plain text; Markdown unchanged, since models understand its markup."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ProblemError("is not UTF-8 text") from error


def _pdf(path: Path) -> str:
    return "\n".join(_pages(path))


def _pages(path: Path) -> Iterator[str]:
    """Yield the text of each page; a page that is referenced twice is read once."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    known: dict[int, str] = {}
    characters = 0
    for number, page in enumerate(PdfReader(path).pages, start=1):
        if number > MAX_PAGES:
            raise ProblemError(f"has more than {MAX_PAGES} pages")
        name = page.indirect_reference.idnum if page.indirect_reference else -number
        if name not in known:
            known[name] = page.extract_text()
        characters += len(known[name])
        if characters > MAX_CHARACTERS:
            raise ProblemError(f"holds more than {MAX_CHARACTERS} characters")
        yield known[name]


def _html(path: Path) -> str:
    """Return the text that a browser would show, blocks as paragraphs.

    The encoding is the one that the markup declares.
    """
    from bs4.dammit import UnicodeDammit

    markup = UnicodeDammit(path.read_bytes(), is_html=True).unicode_markup
    if markup is None:
        raise ProblemError("has an unknown encoding")
    shown = _ShownText()
    shown.feed(markup)
    shown.close()
    lines = (" ".join(line.split()) for line in "".join(shown.parts).split("\n"))
    return re.sub(r"\n{3,}", PARAGRAPH, "\n".join(lines))


class _ShownText(HTMLParser):
    """Collects visible text in one pass, in ``parts``; an unclosed tag ends with its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._open: list[str] = []
        self._count: Counter[str] = Counter()
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._break(tag)
        if tag not in VOID_TAGS:
            self._open.append(tag)
            self._count[tag] += 1
            self._unseen += tag in UNSEEN_TAGS

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._count[tag]:
            last = self._open.pop()
            self._count[last] -= 1
            self._unseen -= last in UNSEEN_TAGS
            if last in BLOCK_TAGS and not self._unseen:
                self.parts.append(PARAGRAPH)
            if last == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(data)

    def _break(self, tag: str) -> None:
        if not self._unseen:
            self.parts.append(PARAGRAPH if tag in BLOCK_TAGS else BEFORE_TAGS.get(tag, ""))


EXTRACTORS: dict[str, Callable[[Path], str]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ".md", ".markdown"), _plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".pdf": _pdf,
}


def answer(path: Path) -> dict[str, str]:
    """Return the answer to a path."""
    try:
        return {"text": extract(path)}
    except ProblemError as error:
        return {"problem": str(error)}
    except ImportError as error:
        return {"missing": error.name or str(error)}
    except (MemoryError, RecursionError):
        return {"problem": "needs more memory than a file may"}
    except Exception as error:  # parsers of foreign formats raise anything
        return {"problem": _reason(error)}


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> None:
    """Answer paths until the input ends. Output of parsers is discarded."""
    with suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        for line in sys.stdin:
            print(json.dumps(answer(Path(json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main()
