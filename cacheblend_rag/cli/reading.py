"""From paths to passages: find files, read their text through LlamaIndex, split it by tokens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import CacheBlendError, MissingExtraError

EXTRA = "rag"
PARAGRAPH = "\n\n"
UNSEEN_TAGS = ("script", "style", "noscript", "template", "svg", "iframe")
LINE_TAGS = frozenset({"li", "tr", "dt", "dd", "option"})
CELL_TAGS = frozenset({"td", "th"})
BLOCK_TAGS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "caption", "details", "div", "dl"}
    | {"fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6"}
    | {"head", "header", "hr", "main", "nav", "ol", "p", "pre", "section", "select", "summary"}
    | {"table", "title", "ul"}
)


class UnreadableFileError(CacheBlendError):
    """A file holds no text that can be read; the message says why, without the file's name."""


@dataclass(frozen=True)
class FoundFiles:
    """What a walk over paths found.

    files: those that can be read, in order. unknown: how many have another extension. unopened:
    folders that could not be listed, with the reason.
    """

    files: tuple[Path, ...]
    unknown: int
    unopened: tuple[tuple[Path, str], ...]


def find_files(paths: Iterable[Path], leave_out: Path) -> FoundFiles:
    """Return the files among ``paths`` and in folders among them, each once.

    In folders, what is hidden (a name that begins with a dot) and the folder ``leave_out`` are
    passed over. Folders that are links are not followed.
    """
    files: dict[Path, None] = {}
    unknown: set[Path] = set()
    unopened: list[tuple[Path, str]] = []

    def refused(error: OSError) -> None:
        unopened.append((Path(error.filename), error.strerror or str(error)))

    for path in paths:
        if os.path.isdir(path):  # unlike Path.is_dir, False where it may not look
            found: Iterable[Path] = _walk(path.resolve(), leave_out.resolve(), refused)
        else:
            found = [path.parent.resolve() / path.name]
        for file in found:
            if not os.path.isfile(file):
                continue
            if file.suffix.lower() in READERS:
                files[file] = None
            else:
                unknown.add(file)
    return FoundFiles(tuple(files), len(unknown), tuple(unopened))


def read_text(path: Path) -> str:
    """Return a file's text, with line feeds for line breaks.

    Raises UnreadableFileError when the file cannot be read or holds no text, MissingExtraError
    without the extra ``rag``.
    """
    try:
        text = READERS[path.suffix.lower()](path)
    except ImportError as error:
        raise MissingExtraError("reading documents", EXTRA) from error
    except CacheBlendError:
        raise
    except Exception as error:  # parsers of foreign formats raise anything
        raise UnreadableFileError(_reason(error)) from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\x00", "")
    # PDF fonts can map to unpaired surrogates, which no tokenizer takes.
    text = text.encode("utf-8", "replace").decode("utf-8").strip()
    if not text:
        raise UnreadableFileError("holds no text")
    return text


def make_splitter(
    tokenize: Callable[[str], Sequence[int]], chunk_size: int, chunk_overlap: int
) -> Callable[[str], list[str]]:
    """Return a function that splits text at paragraphs, sentences and, last, words.

    chunk_size, chunk_overlap: in tokens of ``tokenize``. Raises MissingExtraError.
    """
    try:
        from llama_index.core.node_parser import SentenceSplitter
    except ImportError as error:
        raise MissingExtraError("splitting documents", EXTRA) from error
    splitter: Any = SentenceSplitter(
        chunk_size=chunk_size,
        chunk_overlap=chunk_overlap,
        tokenizer=tokenize,
        paragraph_separator=PARAGRAPH,
    )

    def split(text: str) -> list[str]:
        chunks: list[str] = splitter.split_text(text)
        return chunks

    return split


def _walk(folder: Path, leave_out: Path, refused: Callable[[OSError], None]) -> Iterator[Path]:
    for base, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and Path(base, name) != leave_out
        )
        yield from (Path(base, name) for name in sorted(names) if name[0] != ".")


def _read_plain(path: Path) -> str:
    """Read plain text; Markdown as it stands, since its marks mean something to a model."""
    from llama_index.readers.file import FlatReader

    try:
        return _joined(FlatReader().load_data(path))
    except ValueError as error:
        raise UnreadableFileError("is not UTF-8 text") from error


def _read_pdf(path: Path) -> str:
    from llama_index.readers.file import PDFReader
    from tenacity import RetryError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        return _joined(PDFReader(return_full_document=True).load_data(path))
    except RetryError as error:
        raise error.last_attempt.exception() or error from None


def _read_html(path: Path) -> str:
    """Read the text a browser would show, blocks as paragraphs.

    Markup is decoded as it declares; LlamaIndex's own HTML readers join words of neighbouring
    blocks and keep scripts.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(path.read_bytes(), "html.parser")
    for tag in soup(UNSEEN_TAGS):
        tag.decompose()
    for tag in soup.find_all("br"):
        tag.replace_with("\n")
    for tag in soup.find_all(LINE_TAGS):
        tag.insert_before("\n")
    for tag in soup.find_all(CELL_TAGS):
        tag.insert_before(" ")
    for tag in soup.find_all(BLOCK_TAGS):
        tag.insert_before(PARAGRAPH)
        tag.insert_after(PARAGRAPH)
    lines = (" ".join(line.split()) for line in soup.get_text().split("\n"))
    return re.sub(r"\n{3,}", PARAGRAPH, "\n".join(lines))


def _joined(documents: Iterable[Any]) -> str:
    return PARAGRAPH.join(str(document.text) for document in documents)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


READERS: dict[str, Callable[[Path], str]] = {
    **dict.fromkeys((".txt", ".text", ".rst", ".md", ".markdown"), _read_plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    ".pdf": _read_pdf,
}
