"""Extracts text from files, and is started as ``python -m`` this module for PDF and HTML.

Documents are untrusted: a hostile one can make its parser take hours or all memory, or crash. So
parsers run in a process of their own, which is killed when it takes too long (see ``readers``). It
prints the answer of ``answer`` as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from unicodedata import category

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
    | {"table", "textarea", "title", "ul"}
)
VERBATIM_TAGS = frozenset({"pre", "textarea"})
VOID_TAGS = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track"}
    | {"wbr"}
)


MARKS = {
    b"\xef\xbb\xbf": "utf-8",
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
SUPERSETS = {
    **dict.fromkeys(("ascii", "us-ascii", "iso-8859-1", "latin1", "latin-1"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987"), "cp949"),
}
"""What browsers read for a declared encoding."""
GUESSED = ["cp1252", "cp1251", "cp932", "euc_jp", "gb18030", "big5", "cp949", "koi8_r", "cp1250"]
GUESSED += ["cp1253", "cp1255", "cp1256"]
SAMPLE_BYTES = 1 << 16
MOST_BROKEN = 0.01
"""The share of a text's characters that may be control characters."""
HIGH_HALVES = [bytes([upper]) for upper in range(8)]
"""Upper bytes of UTF-16 for Latin, Greek, Cyrillic, Hebrew and Arabic letters."""
STRANGE = frozenset({"Cc", "Cn", "Co"})
"""Unicode categories of control characters, and of what stands for no character."""
NO_TEXT = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


class ProblemError(Exception):
    """A file holds no text that can be read; the message says why, without the file's name."""


@dataclass(frozen=True)
class Extracted:
    """A file's text, with line feeds for line breaks, and what its owner should know of it."""

    text: str
    note: str = ""


def extract(path: Path) -> Extracted:
    """Return a file's text.

    Raises ProblemError if a limit is exceeded or there is no text, ImportError if a library is
    missing, and any error of a parser.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ProblemError(f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    found = EXTRACTORS[path.suffix.lower()](path)
    text = found.text
    if len(text) > MAX_CHARACTERS:
        raise ProblemError(f"holds more than {MAX_CHARACTERS} characters")
    if not _is_text(text):
        raise ProblemError("holds control characters in place of text")
    clean = NO_TEXT.sub("", text)  # of surrogates, too, to which PDF fonts can map
    clean = re.sub(r"\A\s*\n", "", clean).rstrip()  # the first line keeps its indentation
    if not clean.strip():
        raise ProblemError("holds no text")
    damaged = clean.count("\ufffd")
    notes = [found.note, f"damaged characters: {damaged}" if damaged else ""]
    return Extracted(clean, "; ".join(filter(None, notes)))


def decode(data: bytes, declared: str | None = None) -> Extracted:
    """Return the text of bytes; a note says if its encoding is a guess.

    Evidence goes before the encoding that the file declares: a byte order mark, valid UTF-8, the
    control characters that UTF-16 looks like otherwise. Without either, the encoding is guessed
    from the letters' frequencies.

    Raises ProblemError when several encodings are as likely.
    """
    note, text = "", _decode_by_evidence(data)
    if text is None and declared and not declared.lower().startswith(("utf", "unicode")):
        with suppress(LookupError, UnicodeError):
            text = data.decode(SUPERSETS.get(declared.lower(), declared))
    if text is None:
        encoding = _guess(data)
        text, note = data.decode(encoding, "replace"), f"is not UTF-8: read as {encoding}, a guess"
    return Extracted(text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), note)


def _is_text(text: str) -> bool:
    return len(text) - len(NO_TEXT.sub("", text)) <= MOST_BROKEN * len(text)


def _decode_by_evidence(data: bytes) -> str | None:
    """Return the text if the bytes say themselves how they are encoded, else None."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            with suppress(UnicodeError):
                return data.decode(encoding)
    if b"\x1b$" in data:
        with suppress(UnicodeError):
            return data.decode("iso2022_jp")
    text = data.decode("utf-8", "replace")
    damaged = text.count("\ufffd") - data.count("\ufffd".encode())
    is_utf8 = 10 * damaged <= len(text) - len(text.encode("ascii", "ignore"))
    if is_utf8 and _is_text(text):
        return text
    for encoding, halves in (("utf-16-le", data[1::2]), ("utf-16-be", data[::2])):
        if sum(map(halves.count, HIGH_HALVES)) > 0.9 * len(halves):
            wide = data.decode(encoding, "replace")
            strange = sum(n for one, n in Counter(wide).items() if category(one) in STRANGE)
            if strange <= MOST_BROKEN * len(wide):
                return wide
    return text if is_utf8 else None


def _guess(data: bytes) -> str:
    """Return the likeliest encoding of letters beyond ASCII, Windows-1252 among equals."""
    from charset_normalizer import from_bytes

    beyond = re.search(rb"[\x80-\xff]", data)
    sample = data[max(beyond.start() - 1024, 0) if beyond else 0 :]
    if len(sample) > SAMPLE_BYTES:
        sample = sample[: sample.rfind(b"\n", 0, SAMPLE_BYTES) + 1 or SAMPLE_BYTES]
    # Chaos: characters that hardly stand together; coherence: a language's frequent letters.
    found = [(one.chaos - one.coherence, one) for one in from_bytes(sample, cp_isolation=GUESSED)]
    if not found:
        raise ProblemError("is no text in a known encoding")
    best = min(rank for rank, _ in found)
    if any("cp1252" in one.could_be_from_charset for rank, one in found if rank <= best + 0.05):
        return "cp1252"
    likeliest = [one.encoding for rank, one in found if rank == best]
    if len(likeliest) != 1:
        raise ProblemError("is not UTF-8, and its encoding cannot be told: save it as UTF-8")
    return str(likeliest[0])


def _plain(path: Path) -> Extracted:
    """Return plain text; Markdown unchanged, since models understand its markup."""
    return decode(path.read_bytes())


def _pdf(path: Path) -> Extracted:
    from pypdf import errors

    try:
        pages = _pages(path)
    except errors.PyPdfError as error:
        raise ProblemError(f"is a damaged or protected PDF ({_reason(error)})") from error
    textless = sum(not page.strip() for page in pages)
    if textless == len(pages):
        raise ProblemError(f"holds no text on its {textless} pages: scans need OCR first")
    note = f"{textless} of {len(pages)} pages hold no text: scans need OCR first"
    return Extracted("\n".join(pages), note if textless else "")


def _pages(path: Path) -> list[str]:
    """Return the text of each page; a page that is referenced twice is read once."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    known: dict[int, str] = {}
    pages: list[str] = []
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
        pages.append(known[name])
    return pages


def _html(path: Path) -> Extracted:
    """Return the text that a browser would show, blocks as paragraphs."""
    from bs4.dammit import EncodingDetector

    data = path.read_bytes()
    markup = decode(data, EncodingDetector.find_declared_encoding(data, is_html=True))
    shown = _ShownText()
    shown.feed(markup.text)
    shown.close()
    text = ""
    for verbatim, parts in groupby(shown.parts, key=itemgetter(1)):
        part = "".join(data for data, _ in parts)
        lines = part.split("\n")
        text += part if verbatim else "\n".join(" ".join(line.split()) for line in lines)
    return replace(markup, text=re.sub(r"\n{3,}", PARAGRAPH, text))


class _ShownText(HTMLParser):
    """Collects visible text in one pass, in ``parts``: each with whether white space counts.

    An unclosed tag ends with its parent. What an unclosed tag would hide is shown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, bool]] = []
        self._open: list[str] = []
        self._count: Counter[str] = Counter()
        self._hidden: list[tuple[str, bool]] = []
        self._unseen = 0
        self._raw: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in BLOCK_TAGS and tag != "title" and self._unseen == self._count["svg"]:
            self.handle_endtag("svg")  # as in browsers: a block does not belong to a drawing
        self._break(tag)
        if tag not in VOID_TAGS:
            self._open.append(tag)
            self._count[tag] += 1
            self._unseen += tag in UNSEEN_TAGS

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._put("".join(self._raw))
        self._raw.clear()
        while self._count[tag]:
            last = self._open.pop()
            self._count[last] -= 1
            self._unseen -= last in UNSEEN_TAGS
            if not self._unseen:
                self.parts += [] if last == tag else self._hidden
                self._hidden.clear()
            if last in BLOCK_TAGS:
                self._put(PARAGRAPH)
            if last == tag:
                return

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self._raw.append(data)
        else:
            self._put(data)

    def close(self) -> None:
        """End the input; what follows a script, style or text area without an end is markup."""
        super().close()
        self.parts += self._hidden
        if self.cdata_elem:
            rest = _MarkupAlone()
            rest.feed("".join(self._raw) + self.rawdata)
            rest.close()
            self.parts += rest.parts

    def _break(self, tag: str) -> None:
        self._put(PARAGRAPH if tag in BLOCK_TAGS else BEFORE_TAGS.get(tag, ""))

    def _put(self, data: str) -> None:
        verbatim = any(self._count[tag] for tag in VERBATIM_TAGS)
        (self._hidden if self._unseen else self.parts).append((data, verbatim))


class _MarkupAlone(_ShownText):
    """Reads the content of every element as markup."""

    def set_cdata_mode(self, *_: Any, **__: Any) -> None:
        pass


EXTRACTORS: dict[str, Callable[[Path], Extracted]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ".md", ".markdown"), _plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".pdf": _pdf,
}


def is_plain(path: Path) -> bool:
    """Whether a file is read without a parser."""
    return EXTRACTORS[path.suffix.lower()] is _plain


def answer(path: Path) -> dict[str, str]:
    """Return a file's ``text`` and ``note``, or a ``problem``, or the ``missing`` library."""
    try:
        return asdict(extract(path))
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


def main(path: str) -> None:
    """Print the answer to a path. Output of parsers is discarded."""
    with suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        json.dump(answer(Path(path)), answers)


if __name__ == "__main__":
    main(sys.argv[1])
