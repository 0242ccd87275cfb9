from __future__ import annotations

import builtins
import os
import socket
import zlib

import pytest

from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.rag import readers
from cacheblend_rag.rag.readers import Extracted, UnreadableFileError, find_files, read_file
from tests.cli.documents import pdf_bytes

HTML = """<!doctype html><html><head><title>Manual</title><style>p {color: red}</style></head>
<body><script>track()</script><h1>How to <b>start</b></h1><div><p>First
step.<br>Then wait.</p></div><p>Costs 3 &lt; 4 {euro}.</p><ul><li>red</li><li>blue</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table><!-- hidden --></body></html>"""


def test_files_are_found_in_folders_and_by_name(tmp_path):
    for name in ("b.TXT", "a.md", "sub/c.html", "sub/d.pdf", "sub/e.png", "no-extension"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for hidden in (".git/config.txt", ".secret.txt", "sub/~$notes.txt", "collection/own.txt"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_text("x")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    found = find_files([tmp_path, tmp_path / "a.md"], tmp_path / "collection")
    names = [str(path.relative_to(tmp_path)) for path in found.files]
    assert names == ["a.md", "b.TXT", "sub/c.html", "sub/d.pdf"]
    assert found.unknown == 2
    assert find_files([tmp_path / ".secret.txt"], tmp_path / "collection").files


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"\xef\xbb\xbfOne\r\ntwo \xc3\xa9\n\n", "One\ntwo \u00e9"),
        ("a.txt", b"\n\n  one\n two" + b"." * 100 + b"\x00", "  one\n two" + "." * 100),
        ("a.txt", b"line one\rline two\r\rparagraph two", "line one\nline two\n\nparagraph two"),
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
    assert read_file(path) == Extracted(text)


RUSSIAN = "Насос номер семь держит давление девять бар. Проверьте уплотнение раз в год."  # noqa: RUF001
GERMAN = "Die Pumpe läuft im Büro über Nacht; die Öffnung ist größer als 3 mm."
LOCK_FILE = b"\x05Anna M".ljust(54) + "\x05Anna M".ljust(54).encode("utf-16-le")
JAPANESE = "ポンプ七号の圧力は九バールです。年に一度シールを点検してください。"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (RUSSIAN.encode("utf-16-le"), RUSSIAN),
        (RUSSIAN.encode("utf-16-be"), RUSSIAN),
        (GERMAN.encode("utf-16-be"), GERMAN),
        (JAPANESE.encode("utf-16"), JAPANESE),
        (JAPANESE.encode("utf-32"), JAPANESE),
        (JAPANESE.encode("utf-8-sig"), JAPANESE),
    ],
)
def test_the_bytes_say_how_text_is_encoded(data, text):
    for declared in (None, "latin-1", "utf-16", "shift_jis"):
        assert readers.decode(data, declared) == Extracted(text)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(GERMAN, "cp1252"), (RUSSIAN, "cp1251"), (RUSSIAN, "koi8_r"), (JAPANESE, "cp932")],
)
def test_a_guess_of_the_encoding_is_told(tmp_path, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    note = f"is not UTF-8: read as {encoding}, a guess"
    assert read_file(tmp_path / "a.txt") == Extracted(text, note)
    assert readers.decode(text.encode(encoding), encoding) == Extracted(text)


def test_damaged_characters_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode()[:-4] + b"\xff" + "год.".encode())
    assert read_file(tmp_path / "a.txt").note == "damaged characters: 2"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<meta charset=utf-16><p>Pump seven", "Pump seven"),
        ("<meta charset=iso-8859-1><p>größer", "größer"),
        ('<p>a</p><svg><path d="x"><p>b</p>', "a\n\nb"),
        ("<svg><title>logo</title></svg>a<svg><g>rest", "logo\n\narest"),
        ("<p>a</p><script src=x><p>b</p><p>c", "a\n\nb\n\nc"),
        ("<title>T<p>b</p>", "T\n\nb"),
        ("<textarea>x<p>b</p>", "x\n\nb"),
        ("<select><option>a<option>b<p>c", "a\nb\n\nc"),
        ("<script>x()</script><style>p {}</style>a", "a"),
        (
            "<pre>def f(x):\n\tif x:\n\t\treturn 1\n</pre><p>a  b",
            "def f(x):\n\tif x:\n\t\treturn 1\n\na b",
        ),
        ("<pre>\r\n  a<br>    b\r\n</pre>", "  a\n    b"),
        ("<p>x</p><textarea>  two\n   three</textarea>", "x\n\n  two\n   three"),
    ],
)
def test_markup_is_read_as_it_is_shown_and_nothing_behind_an_open_element_is_lost(
    tmp_path, markup, text
):
    (tmp_path / "a.html").write_bytes(markup.encode())
    assert read_file(tmp_path / "a.html") == Extracted(text)


def test_pages_without_text_are_counted(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf_bytes("one", "", "three", ""))
    note = "2 of 4 pages hold no text: scans need OCR first"
    assert read_file(tmp_path / "a.pdf") == Extracted("one\n\nthree\n".strip(), note)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "no text"),
        ("a.md", b" \n\x00", "control characters in place of text"),
        ("a.md", b" \n", "no text"),
        ("a.txt", b"\xff\xfe\x00" + bytes(range(256)), "no text in a known encoding"),
        ("a.txt", LOCK_FILE, "control characters in place of text"),
        ("a.pdf", b"not a PDF", "is a damaged or protected PDF .Pdf"),
        ("a.pdf", pdf_bytes("one", "two")[:-200], "is a damaged or protected PDF .Pdf"),
        ("a.pdf", pdf_bytes("", ""), "holds no text on its 2 pages: scans need OCR first"),
        ("a.html", b"<script>x</script>", "no text"),
        ("a.html", None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=reason) as raised:
        read_file(path)
    assert "\n" not in str(raised.value)


def test_without_the_extra_its_name_is_told(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] in {"llama_index", "pypdf", "bs4"}:
            raise ImportError(name, name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for name, library in (("a.pdf", "pypdf"), ("a.html", "bs4.dammit")):
        (tmp_path / name).write_text("x")
        answer = readers.answer(tmp_path / name)
        assert answer == {"missing": library}
        monkeypatch.setattr(readers, "_parsed", lambda *_, answer=answer: answer)
        with pytest.raises(MissingExtraError, match=r"cacheblend-rag\[rag\]"):
            read_file(tmp_path / name)


# Hostile files

HOSTILE_MARKUP = {
    "attributes": "<a " + "x=" * 2_000_000,
    "comments": "<!--" * 200_000,
    "crossed": "<b><i>" * 50_000 + "</b>" * 50_000 + "x",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*HOSTILE_MARKUP, "bomb", "operators"])
def test_a_hostile_file_is_named_and_the_next_is_read(tmp_path, kind):
    hostile, good = tmp_path / "hostile.pdf", tmp_path / "good.txt"
    good.write_text("All is well.")
    stream = b"BT /F1 1 Tf (hello world) Tj ET "
    if kind in HOSTILE_MARKUP:
        hostile = tmp_path / "hostile.html"
        hostile.write_text(HOSTILE_MARKUP[kind])
    elif kind == "bomb":
        hostile.write_bytes(one_page(zlib.compress(b" " * (1 << 28), 9)))
    else:
        hostile.write_bytes(one_page(zlib.compress(stream * 500_000, 9)))
    try:
        assert len(read_file(hostile, 3).text) < readers.MAX_CHARACTERS
    except UnreadableFileError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either will do, so long as it ends
    assert read_file(good).text == "All is well."


def test_limits_are_told(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("x" * 100)
    monkeypatch.setattr(readers, "MAX_CHARACTERS", 99)
    assert readers.answer(text) == {"problem": "holds more than 99 characters"}
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", 0)
    assert readers.answer(text) == {"problem": "is larger than 0 MiB"}
    pdf = tmp_path / "a.pdf"
    pdf.write_bytes(pdf_bytes("one", "two", "three"))
    monkeypatch.undo()
    monkeypatch.setattr(readers, "MAX_PAGES", 2)
    assert readers.answer(pdf) == {"problem": "has more than 2 pages: split it"}


@pytest.mark.parametrize(
    ("parser", "said"),
    [("os.kill(os.getpid(), 9)", "ends the process"), ("time.sleep(60)", "takes longer than 2 s")],
)
def test_a_parser_that_is_killed_or_stuck_is_told(tmp_path, monkeypatch, parser, said):
    (tmp_path / "parser.py").write_text(f"import os, time\n{parser}\n")
    (tmp_path / "a.pdf").write_bytes(pdf_bytes("fine"))
    with monkeypatch.context() as broken:
        broken.setattr(readers, "PARSER", "parser")
        broken.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(UnreadableFileError, match=said):
            read_file(tmp_path / "a.pdf", 2)
    assert read_file(tmp_path / "a.pdf").text == "fine"


def test_no_module_is_taken_from_the_folder_that_is_indexed(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit")
    (tmp_path / "a.html").write_text("fine")
    monkeypatch.chdir(tmp_path)
    assert read_file(tmp_path / "a.html").text == "fine"


def one_page(stream: bytes) -> bytes:
    """Return a PDF of one compressed page."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
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
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        found = find_files([tmp_path, tmp_path / "pipe.txt"], tmp_path / "collection")
    assert found.files == (tmp_path / "notes.txt",)
    told = {path.name: reason for path, reason in found.unopened}
    kind = "is a pipe, a socket or a device, not a file"
    assert told == {
        "pipe.txt": kind,
        "agent": kind,
        "broken.md": "is a broken link (No such file or directory)",
        "loop.txt": "is a broken link (Too many levels of symbolic links)",
    }
