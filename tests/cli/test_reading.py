from __future__ import annotations

import builtins
import os

import pytest

from cacheblend_rag.cli.reading import UnreadableFileError, find_files, make_splitter, read_text
from cacheblend_rag.errors import MissingExtraError
from tests.cli.documents import pdf_bytes

HTML = """<!doctype html><html><head><title>Manual</title><style>p {color: red}</style></head>
<body><script>track()</script><h1>How to <b>start</b></h1><div><p>First
step.<br>Then wait.</p></div><p>Costs 3 &lt; 4 {euro}.</p><ul><li>red</li><li>blue</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table><!-- hidden --></body></html>"""


def words(text):
    return text.split()


def test_files_are_found_in_folders_and_by_name(tmp_path):
    for name in ("b.TXT", "a.md", "sub/c.html", "sub/d.pdf", "sub/e.png", "no-extension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for hidden in (".git/config.txt", ".secret.txt", "collection/own.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("x")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    found = find_files([tmp_path, tmp_path / "a.md"], tmp_path / "collection")
    names = [str(path.relative_to(tmp_path)) for path in found.files]
    assert names == ["a.md", "b.TXT", "sub/c.html", "sub/d.pdf"]
    assert found.unknown == 2
    assert find_files([tmp_path / ".secret.txt"], tmp_path / "collection").files


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_files([tmp_path], tmp_path / "collection").files == ()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"\xef\xbb\xbfOne\r\ntwo \x00\xc3\xa9\n\n", "One\ntwo \u00e9"),
        ("a.md", b"# Head\n\nSee [here](x) <b>\n", "# Head\n\nSee [here](x) <b>"),
        ("a.pdf", pdf_bytes("The first page.", "The second."), "The first page.\nThe second."),
        (
            "a.html",
            HTML.encode(),
            "Manual\n\nHow to start\n\nFirst\nstep.\nThen wait.\n\nCosts 3 < 4 {euro}.\n\n"
            "red\nblue\n\na b\nc",
        ),
        ("a.HTM", '<meta charset="latin-1"><p>caf\u00e9'.encode("latin-1"), "caf\u00e9"),
    ],
)
def test_text_is_read_clean(tmp_path, name, content, text):
    path = tmp_path / name
    path.write_bytes(content)
    assert read_text(path) == text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "no text"),
        ("a.md", b" \n\x00", "no text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.pdf", b"not a PDF", "Pdf"),
        ("a.pdf", pdf_bytes(""), "no text"),
        ("a.html", b"<script>x</script>", "no text"),
        ("a.html", None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=reason) as raised:
        read_text(path)
    assert "\n" not in str(raised.value)


def test_chunks_keep_to_the_size_and_lose_nothing():
    text = "\n\n".join(f"Note {n} says {{this}} and more. It has a second line." for n in range(30))
    chunks = make_splitter(words, 24, 0)(text)
    assert max(len(words(chunk)) for chunk in chunks) <= 24
    assert words(" ".join(chunks)) == words(text)
    assert all(chunk.startswith("Note") for chunk in chunks)


def test_without_the_extra_its_name_is_told(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "llama_index":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: read_text(tmp_path / "a.txt"), lambda: make_splitter(words, 9, 0)):
        with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[rag\]"):
            call()
