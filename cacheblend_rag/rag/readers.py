"""Finds files, and reads their text; is started as ``python -m`` this module for PDF and HTML.

Documents are untrusted: a hostile one can make its parser take hours or all memory, or crash. So
parsers run in a process of their own, which is killed when it takes too long. It prints the answer
of ``answer`` as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import CacheBlendError, MissingExtraError

EXTRA = "rag"
FILE_SECONDS = 60.0
MAX_FILE_BYTES = 256 << 20
MAX_CHARACTERS = 32 << 20
MAX_PAGES = 20_000
MAX_MEMORY_BYTES = 2 << 30

PARAGRAPH = "\n\n"
BREAKS_BEFORE = {
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
HIDDEN_TAGS = frozenset({"script", "style", "iframe", "noembed", "noframes"})
"""What a browser shows nothing of, and parsers take as a text without markup."""

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
}
"""What browsers read for a declared encoding."""
GUESSED = ["cp1252", "cp1251", "cp932", "euc_jp", "gb18030", "big5", "cp949", "koi8_r"]
SAMPLE_BYTES = 1 << 16
MOST_BROKEN = 0.01
"""The share of a text's characters that may be control characters."""
HIGH_HALVES = [bytes([upper]) for upper in range(8)]
"""Upper bytes of UTF-16 for Latin, Greek, Cyrillic, Hebrew and Arabic letters."""
NO_TEXT = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


class UnreadableFileError(CacheBlendError):
    """A file holds no text that can be read; the message says why, without the file's name."""


@dataclass(frozen=True)
class Extracted:
    """A file's text, with line feeds for line breaks, and what its owner should know of it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class FoundFiles:
    """The files found below paths.

    files: those that can be read, in order. unknown: how many have another extension. unopened:
    with the reason, folders that could not be listed, links that are not followed, and what is no
    regular file.
    """

    files: tuple[Path, ...]
    unknown: int
    unopened: tuple[tuple[Path, str], ...]


def find_files(paths: Iterable[Path], leave_out: Path) -> FoundFiles:
    """Return the files among ``paths`` and in folders among them, each once.

    Hidden files and folders (names that begin with a dot), lock files of office programs (with
    ``~$``) and the folder ``leave_out`` are skipped. Links to folders, and links to files outside,
    are not followed.
    """
    files: dict[Path, None] = {}
    unknown: set[Path] = set()
    unopened: list[tuple[Path, str]] = []

    def refused(error: OSError) -> None:
        unopened.append((Path(error.filename), error.strerror or str(error)))

    for path in paths:
        walked = path.resolve() if os.path.isdir(path) else None  # False where it may not look
        found: Iterable[Path] = [path.parent.resolve() / path.name]
        for file in _walk(walked, leave_out.resolve(), refused) if walked else found:
            if not os.path.isfile(file):
                if reason := _no_file(file):
                    unopened.append((file, reason))
            elif walked and not file.resolve().is_relative_to(walked):
                unopened.append((file, "is a link that leads out of the folder"))
            elif file.suffix.lower() in EXTRACTORS:
                files[file] = None
            else:
                unknown.add(file)
    return FoundFiles(tuple(files), len(unknown), tuple(unopened))


def _walk(folder: Path, leave_out: Path, refused: Callable[[OSError], None]) -> Iterator[Path]:
    for base, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and Path(base, name) != leave_out
        )
        yield from (Path(base, name) for name in sorted(names) if not name.startswith((".", "~$")))


def _no_file(path: Path) -> str | None:
    """Return what a path is if it is no file; None if it does not exist."""
    try:
        path.stat()
    except OSError as error:
        if path.is_symlink():
            return f"is a broken link ({error.strerror})"
        return None if isinstance(error, FileNotFoundError) else error.strerror
    return "is a pipe, a socket or a device, not a file"


def read_file(path: Path, seconds: float = FILE_SECONDS) -> Extracted:
    """Return a file's text; PDF and HTML are parsed in a process that hostile files may crash.

    Raises UnreadableFileError when the file cannot be read, holds no text, is too large or takes
    longer than ``seconds``, MissingExtraError without the extra ``rag``.
    """
    is_plain = EXTRACTORS[path.suffix.lower()] is _plain
    found = answer(path) if is_plain else _parsed(path, seconds)
    if "missing" in found:
        raise MissingExtraError("reading documents", EXTRA)
    if "text" not in found:
        raise UnreadableFileError(found["problem"])
    return Extracted(**found)


def _parsed(path: Path, seconds: float) -> dict[str, str]:
    """Return the answer of a process that is killed when it takes longer than ``seconds``."""
    # -P: no module is imported from the current folder.
    command = [sys.executable, "-P", "-m", PARSER, os.path.abspath(path)]
    try:
        done = subprocess.run(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=True
        )
    except subprocess.TimeoutExpired:
        raise UnreadableFileError(f"takes longer than {seconds:g} s to read") from None
    except subprocess.CalledProcessError:
        raise UnreadableFileError("ends the process that reads it") from None
    found: dict[str, str] = json.loads(done.stdout)
    return found


def answer(path: Path) -> dict[str, str]:
    """Return a dict: ``text`` and ``note``, or ``problem``, or ``missing``, a library's name."""
    try:
        return asdict(_extract(path))
    except UnreadableFileError as error:
        return {"problem": str(error)}
    except ImportError as error:
        return {"missing": error.name or str(error)}
    except (MemoryError, RecursionError):
        return {"problem": "needs more memory than a file may"}
    except Exception as error:  # parsers of foreign formats raise anything
        return {"problem": _reason(error)}


def _extract(path: Path) -> Extracted:
    """Return a file's text.

    Raises UnreadableFileError if a limit is exceeded or there is no text, ImportError if a library
    is missing, and any error of a parser.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UnreadableFileError(f"is larger than {MAX_FILE_BYTES >> 20} MiB")
    found = EXTRACTORS[path.suffix.lower()](path)
    text = found.text
    if len(text) > MAX_CHARACTERS:
        raise UnreadableFileError(f"holds more than {MAX_CHARACTERS} characters")
    if not _is_text(text):
        raise UnreadableFileError("holds control characters in place of text")
    clean = NO_TEXT.sub("", text)  # of surrogates, too, to which PDF fonts can map
    clean = re.sub(r"\A\s*\n", "", clean).rstrip()  # the first line keeps its indentation
    if not clean.strip():
        raise UnreadableFileError("holds no text")
    damaged = clean.count("\ufffd")
    notes = [found.note, f"damaged characters: {damaged}" if damaged else ""]
    return Extracted(clean, "; ".join(filter(None, notes)))


def decode(data: bytes, declared: str | None = None) -> Extracted:
    """Return the text of bytes; a note says if its encoding is a guess.

    Evidence goes before the encoding that the file declares: a byte order mark, valid UTF-8, the
    control characters that UTF-16 looks like otherwise. Without either, the encoding is guessed
    from the letters' frequencies.
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
    text = data.decode("utf-8", "replace")
    damaged = text.count("\ufffd") - data.count("\ufffd".encode())
    is_utf8 = 10 * damaged <= len(text) - len(text.encode("ascii", "ignore"))
    if is_utf8 and _is_text(text):
        return text
    for encoding, halves in (("utf-16-le", data[1::2]), ("utf-16-be", data[::2])):
        if sum(map(halves.count, HIGH_HALVES)) > 0.9 * len(halves):
            return data.decode(encoding, "replace")
    return text if is_utf8 else None


def _guess(data: bytes) -> str:
    """Return the likeliest encoding of letters beyond ASCII."""
    from charset_normalizer import from_bytes

    beyond = re.search(rb"[\x80-\xff]", data)
    sample = data[max(beyond.start() - 1024, 0) if beyond else 0 :][:SAMPLE_BYTES]
    best = from_bytes(sample, cp_isolation=GUESSED).best()
    if best is None:
        raise UnreadableFileError("is no text in a known encoding: save it as UTF-8")
    return str(best.encoding)


def _plain(path: Path) -> Extracted:
    """Return plain text; Markdown unchanged, since models understand its markup."""
    return decode(path.read_bytes())


def _pdf(path: Path) -> Extracted:
    from pypdf import errors

    try:
        pages = _pages(path)
    except errors.PyPdfError as error:
        raise UnreadableFileError(f"is a damaged or protected PDF ({_reason(error)})") from error
    textless = sum(not page.strip() for page in pages)
    if textless == len(pages):
        raise UnreadableFileError(f"holds no text on its {textless} pages: scans need OCR first")
    note = f"{textless} of {len(pages)} pages hold no text: scans need OCR first"
    return Extracted("\n".join(pages), note if textless else "")


def _pages(path: Path) -> list[str]:
    """Return the text of each page."""
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    pages: list[str] = []
    characters = 0
    for number, page in enumerate(PdfReader(path).pages, start=1):
        if number > MAX_PAGES:
            raise UnreadableFileError(f"has more than {MAX_PAGES} pages: split it")
        pages.append(page.extract_text())
        characters += len(pages[-1])
        if characters > MAX_CHARACTERS:
            raise UnreadableFileError(f"holds more than {MAX_CHARACTERS} characters")
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
    """Collects all text but scripts, styles and frames.

    parts: the texts, each with whether its white space counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, bool]] = []
        self._verbatim = 0
        self._raw: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._put(PARAGRAPH if tag in BLOCK_TAGS else BREAKS_BEFORE.get(tag, ""))
        self._verbatim += tag in VERBATIM_TAGS

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._put(PARAGRAPH if tag in BLOCK_TAGS else BREAKS_BEFORE.get(tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in HIDDEN_TAGS:
            self._put("".join(self._raw))
        self._raw.clear()
        self._verbatim -= self._verbatim > 0 and tag in VERBATIM_TAGS
        self._put(PARAGRAPH if tag in BLOCK_TAGS else "")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self._raw.append(data)
        else:
            self._put(data)

    def close(self) -> None:
        """End the input; what follows a script, style or text area without an end is markup."""
        super().close()
        if self.cdata_elem:
            rest = _MarkupAlone()
            rest.feed("".join(self._raw) + self.rawdata)
            rest.close()
            self.parts += rest.parts

    def _put(self, data: str) -> None:
        self.parts.append((data, self._verbatim > 0))


class _MarkupAlone(_ShownText):
    """Reads the content of every element as markup."""

    def set_cdata_mode(self, *_: Any, **__: Any) -> None:
        pass


EXTRACTORS: dict[str, Callable[[Path], Extracted]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ".md", ".markdown"), _plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _html),
    ".pdf": _pdf,
}
PARSER = "cacheblend_rag.rag.readers"
"""The module that parses, in a process of its own."""


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
