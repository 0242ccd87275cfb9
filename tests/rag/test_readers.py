from __future__ import annotations

import builtins
import os
import signal
import socket
import subprocess
import zlib

import pytest

from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.rag import extracting
from cacheblend_rag.rag.readers import FileReader, UnreadableFileError, find_files, make_splitter
from tests.cli.documents import pdf_bytes

HTML = """<!doctype html><html><head><title>Manual</title><style>p {color: red}</style></head>
<body><script>track()</script><h1>How to <b>start</b></h1><div><p>First
step.<br>Then wait.</p></div><p>Costs 3 &lt; 4 {euro}.</p><ul><li>red</li><li>blue</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table><!-- hidden --></body></html>"""


def words(text):
    return text.split()


@pytest.fixture(scope="module")
def reader():
    with FileReader() as reader:
        yield reader


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
def test_text_is_read_clean(reader, tmp_path, name, content, text):
    path = tmp_path / name
    path.write_bytes(content)
    assert reader.read(path) == text


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
def test_what_cannot_be_read_is_told_in_one_line(reader, tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=reason) as raised:
        reader.read(path)
    assert "\n" not in str(raised.value)


def test_chunks_keep_to_the_size_and_lose_nothing():
    text = "\n\n".join(f"Note {n} says {{this}} and more. It has a second line." for n in range(30))
    chunks = make_splitter(words, 24, 0)(text)
    assert max(len(words(chunk)) for chunk in chunks) <= 24
    assert words(" ".join(chunks)) == words(text)
    assert all(chunk.startswith("Note") for chunk in chunks)


def test_without_the_extra_its_name_is_told(reader, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] in {"llama_index", "pypdf", "bs4"}:
            raise ImportError(name, name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for name, library in (("a.pdf", "pypdf"), ("a.html", "bs4.dammit")):
        (tmp_path / name).write_text("x")
        answer = extracting.answer(tmp_path / name)
        assert answer == {"missing": library}
        monkeypatch.setattr(reader, "_ask", lambda path, answer=answer: answer)
        with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[rag\]"):
            reader.read(tmp_path / name)
    with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[rag\]"):
        make_splitter(words, 9, 0)


# Hostile files

MARKUP = {
    "paragraphs": ("<p>word</p>" * 100_000, "word"),
    "nested": ("<div>" * 100_000 + "x" + "</div>" * 100_000, "x"),
    "unclosed": ("<b>" * 200_000 + "x</i>", "x"),
    "crossed": ("<b><i>" * 50_000 + "</b>" * 50_000 + "x", "x"),
    "hidden": ("<svg>" * 100_000 + "</p>" * 100_000 + "x", None),
}


HOSTILE_MARKUP = {
    "attributes": "<a " + "x=" * 2_000_000,
    "brackets": "<" * 2_000_000,
    "comments": "<!--" * 200_000,
}


@pytest.mark.timeout(120)  # hours, where the square of its length counts
@pytest.mark.parametrize("kind", MARKUP)
def test_hostile_markup_costs_what_its_length_does(tmp_path, kind):
    markup, text = MARKUP[kind]
    (tmp_path / "a.html").write_text(markup)
    found = extracting.answer(tmp_path / "a.html")
    assert found.get("text", text or "")[:4] == (text or found.get("text", ""))[:4]
    assert len(found) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["attributes", "brackets", "comments", "page", "bomb", "operators"]
)
def test_a_hostile_file_is_named_and_the_next_is_read(tmp_path, kind):
    hostile, good = tmp_path / "hostile.pdf", tmp_path / "good.txt"
    good.write_text("All is well.")
    stream = b"BT /F1 1 Tf (hello world) Tj ET "
    if kind in HOSTILE_MARKUP:
        hostile = tmp_path / "hostile.html"
        hostile.write_text(HOSTILE_MARKUP[kind])
    elif kind == "page":
        hostile.write_bytes(one_page(zlib.compress(stream * 200), times=20_000))
    elif kind == "bomb":
        hostile.write_bytes(one_page(zlib.compress(b" " * (1 << 28), 9)))
    else:
        hostile.write_bytes(one_page(zlib.compress(stream * 500_000, 9)))
    with FileReader(seconds=3) as reader:
        try:
            assert len(reader.read(hostile)) < extracting.MAX_CHARACTERS
        except UnreadableFileError as error:
            assert "\n" not in str(error)  # noqa: PT017  # either will do, so long as it ends
        assert reader.read(good) == "All is well."


def test_limits_are_told(reader, tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("x" * 100)
    monkeypatch.setattr(extracting, "MAX_CHARACTERS", 99)
    assert extracting.answer(text) == {"problem": "holds more than 99 characters"}
    monkeypatch.setattr(extracting, "MAX_FILE_BYTES", 0)
    assert extracting.answer(text) == {"problem": "is larger than 0 MiB"}
    pdf = tmp_path / "a.pdf"
    pdf.write_bytes(pdf_bytes("one", "two", "three"))
    monkeypatch.undo()
    monkeypatch.setattr(extracting, "MAX_PAGES", 2)
    assert extracting.answer(pdf) == {"problem": "has more than 2 pages"}


def test_a_reader_that_is_stuck_or_dies_is_replaced(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("fine")
    started, popen = [], subprocess.Popen

    def start(*told, **options):
        started.append(popen(*told, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with FileReader() as reader:
        assert reader.read(text) == "fine"
        started[-1].kill()
        with pytest.raises(UnreadableFileError, match="ends the process"):
            reader.read(text)
        assert reader.read(text) == "fine"
        stuck = started[-1]
        stuck.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(reader, "_seconds", 0.2)
        with pytest.raises(UnreadableFileError, match=r"takes longer than 0.2 s"):
            reader.read(text)
        assert stuck.poll() == -signal.SIGKILL


def test_no_module_is_taken_from_the_folder_that_is_indexed(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit")
    (tmp_path / "a.txt").write_text("fine")
    monkeypatch.chdir(tmp_path)
    with FileReader() as reader:
        assert reader.read(tmp_path / "a.txt") == "fine"


def one_page(stream: bytes, times: int = 1) -> bytes:
    """Return a PDF of one compressed page that is listed so many times."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (b" ".join([b"3 0 R"] * times), times),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    file, starts = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        starts.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    return file + (
        b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
        % (table, len(file))
    )


def test_links_out_of_a_folder_are_not_followed(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    (folder / "sub" / "own.txt").write_text("fine")
    (outside / "secret.txt").write_text("secret")
    (folder / "inner.txt").symlink_to("sub/own.txt")
    (folder / "leak.txt").symlink_to(outside / "secret.txt")
    (folder / "hidden").symlink_to(outside)
    found = find_files([folder], tmp_path / "collection")
    assert [path.name for path in found.files] == ["inner.txt", "own.txt"]
    [(path, reason)] = found.unopened
    assert (path.name, reason) == ("leak.txt", "is a link that leads out of the folder")
    named = find_files([folder / "leak.txt"], tmp_path / "collection")
    assert [path.name for path in named.files] == ["leak.txt"], "who names it wants it"


def test_what_is_no_file_is_named_with_what_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        found = find_files([tmp_path, tmp_path / "pipe.txt"], tmp_path / "collection")
    assert found.files == (tmp_path / "notes.txt",)
    told = {path.name: reason for path, reason in found.unopened}
    assert told == {
        "pipe.txt": "is a pipe, not a file",
        "agent": "is a socket, not a file",
        "broken.md": "is a broken link (No such file or directory)",
        "loop.txt": "is a broken link (Too many levels of symbolic links)",
        "folder.txt": "is a folder, not a file",
    }
