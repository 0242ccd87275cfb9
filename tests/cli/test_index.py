from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.kv import DiskTier, StoredChunk, TieredKVStore
from cacheblend_rag.models import packaged
from cacheblend_rag.rag import FILE_NAME, KV_NAME, indexing
from cacheblend_rag.rag.collection import Collection, sole_writer
from cacheblend_rag.rag.prompt import INSTRUCTION
from tests.cli.documents import pdf_bytes, write_notes
from tests.toy import TOY

CHUNK_SIZE = 64
OPTIONS = ("--model", TOY, "--set", f"chunk_size={CHUNK_SIZE}")


class LetterEmbedder:
    """Counts letters: quick, and good enough where nothing is asked."""

    def __init__(self, name, extra):
        pass

    def embed(self, texts):
        rows = [[text.count(letter) for letter in "abcdefgh"] for text in texts]
        return np.asarray(rows, dtype=np.float32)


@pytest.fixture
def letters(monkeypatch):
    monkeypatch.setattr(indexing, "Embedder", LetterEmbedder)


@pytest.fixture
def notes(tmp_path):
    """A folder of four documents of about four chunks."""
    write_notes(tmp_path / "notes")
    return tmp_path / "notes"


@pytest.fixture
def into(tmp_path):
    return tmp_path / "collection"


@pytest.fixture
def index(cli, into, letters):
    """Run ``index`` on paths and flags, which must succeed; return its JSON."""

    def run(*arguments):
        outcome = cli("index", *arguments, "--into", into, *OPTIONS, "--json")
        assert outcome.code == 0, outcome.stderr
        return outcome.json

    return run


def refused(cli, *arguments):
    """Run a command that must end with one line on stderr and exit code 2; return the line."""
    outcome = cli(*arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    return outcome.stderr


def texts(into):
    with Collection(into) as collection:
        return {d.document_id: d.chunks for d in collection.load()[0]}


def documents_in(into):
    """How many documents are written, seen from outside."""
    try:
        with sqlite3.connect(f"file:{into / FILE_NAME}?mode=ro", uri=True) as file:
            return file.execute("SELECT COUNT(*) FROM documents").fetchone()[0]
    except sqlite3.Error:
        return 0


def stored_kv(into):
    return {key for key, _ in DiskTier(into / KV_NAME).entries()}


def test_a_folder_of_many_kinds_is_indexed_and_the_rest_is_told(cli, tmp_path, into, letters):
    folder = tmp_path / "docs"
    write_notes(folder, count=1)
    (folder / "guide.md").write_text("# Guide\n\nOpen the {lid}.")
    (folder / "page.html").write_text("<title>Page</title><p>Close the lid.</p>")
    (folder / "paper.pdf").write_bytes(pdf_bytes("Paper text.", ""))
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "photo.png").write_bytes(b"x")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "~$guide.txt").write_text("someone")
    outcome = cli("index", folder, "--into", into, *OPTIONS, "--json")
    assert outcome.code == 0
    found = outcome.json
    assert (found["added"], found["documents"], found["unknown"]) == (4, 4, 1)
    assert [skipped["path"] for skipped in found["skipped"]] == [
        str(folder / "binary.txt"),
        str(folder / "empty.txt"),
    ]
    warnings = outcome.stderr.splitlines()
    assert sum(" skipped: " in line for line in warnings) == len(warnings) - 1 == 2
    (note,) = found["notes"]
    assert note["note"] == "1 of 2 pages hold no text: scans need OCR first"
    assert f"warning: {folder / 'paper.pdf'}: {note['note']}" in warnings
    indexed = texts(into)
    assert indexed["docs/guide.md"] == ("# Guide\n\nOpen the {lid}.",)
    assert indexed["docs/page.html"] == ("Page\n\nClose the lid.",)
    assert indexed["docs/paper.pdf"] == ("Paper text.",)
    assert found["computed_chunks"] == found["chunks"] == len(stored_kv(into)) > 5


def test_without_a_model_it_takes_smollm2(cli, notes, into, letters, small_model, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MODELS", str(into.parent / "models"))
    missing = refused(cli, "index", notes, "--into", into)
    assert "run cacheblend-rag models get smollm2" in missing
    assert not into.exists()
    there = packaged.MODELS["smollm2"].folder
    there.parent.mkdir()
    there.symlink_to(small_model)  # stands in for the real one, which would take a minute
    assert cli("index", notes, "--into", into, *OPTIONS[2:]).code == 0
    with Collection(into) as collection:
        assert collection.settings.model == "smollm2"


def test_a_collection_of_another_model_needs_no_smollm2(cli, index, notes, into, monkeypatch):
    monkeypatch.setenv("CACHEBLEND_MODELS", str(into.parent / "models"))
    index(notes)
    for options in ((), ("--rebuild",)):
        outcome = cli("index", notes, "--into", into, *options)
        assert outcome.code == 0, outcome.stderr
        with Collection(into) as collection:
            assert collection.settings.model == TOY


def test_what_is_indexed_is_passed_over_without_loading_a_model(index, notes, monkeypatch):
    first = index(notes)
    monkeypatch.setattr(Collection, "open_engine", None)
    second = index(notes)
    assert (second["added"], second["changed"], second["unchanged"]) == (0, 0, 4)
    assert second["chunks"] == first["chunks"]


def test_the_report_is_lines_otherwise(cli, notes, into, letters):
    outcome = cli("index", notes, "--into", into, *OPTIONS)
    assert outcome.code == 0
    assert "4 documents" in outcome.stdout
    assert "4 added" in outcome.stdout
    assert outcome.stderr == ""
    options = (*OPTIONS, "--rebuild", "--set", "register_only=true")
    assert "none computed, " in cli("index", notes, "--into", into, *options).stdout


def test_a_changed_file_takes_the_place_of_its_older_self_and_its_kv(index, notes, into):
    index(notes)
    before, kv_before = texts(into), stored_kv(into)
    path = sorted(notes.iterdir())[0]
    path.write_text("Quite another text.")
    found = index(notes)
    assert (found["changed"], found["unchanged"], found["computed_chunks"]) == (1, 3, 1)
    after, kv_after = texts(into), stored_kv(into)
    source = f"notes/{path.name}"
    assert after == {**before, source: ("Quite another text.",)}
    assert len(kv_before - kv_after) == len(before[source])
    assert len(kv_after - kv_before) == 1


def test_vanished_files_stay_until_pruned(index, notes, into):
    index(notes)
    path = sorted(notes.iterdir())[1]
    path.unlink()
    found = index(notes)
    assert (found["vanished"], found["removed"], found["documents"]) == (1, 0, 4)
    kv_before, gone = stored_kv(into), texts(into)[f"notes/{path.name}"]
    (notes.parent / "other.txt").write_text("Elsewhere.")
    assert index(notes.parent / "other.txt", "--prune")["removed"] == 0
    found = index(path, "--prune")  # a named file that vanished, as well as a folder above it
    assert (found["vanished"], found["removed"], found["documents"]) == (0, 1, 4)
    assert f"notes/{path.name}" not in texts(into)
    assert len(kv_before - stored_kv(into)) == len(gone)


def test_a_project_may_be_moved_with_its_collection(cli, tmp_path, letters):
    write_notes(tmp_path / "project" / "notes")
    for name, added in (("project", 4), ("moved", 0)):
        if name == "moved":
            (tmp_path / "project").rename(tmp_path / "moved")
        folder = tmp_path / name
        found = cli(
            "index", folder / "notes", "--into", folder / "own", "--model", TOY, "--json"
        ).json
        assert (found["added"], found["documents"], found["vanished"]) == (added, 4, 0)


def test_chunks_that_take_no_kv_are_counted_with_the_reason(cli, tmp_path, into, letters):
    (tmp_path / "long.txt").write_text("word " * 30000)
    options = ("--model", TOY, "--set", "chunk_size=4095", "--json")
    found = cli("index", tmp_path / "long.txt", "--into", into, *options).json
    assert found["refused_chunks"]["longer than the context window"] > 0
    assert found["documents"] == 1


def test_a_file_that_turned_unreadable_keeps_its_older_self(index, notes, into):
    index(notes)
    before = texts(into)
    sorted(notes.iterdir())[0].write_text("")
    found = index(notes, "--prune")
    assert (len(found["skipped"]), found["unchanged"], found["removed"]) == (1, 3, 0)
    assert texts(into) == before


def test_nothing_to_index_is_one_line_and_makes_nothing(cli, tmp_path, into):
    (tmp_path / "photo.png").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    assert "1 with an extension" in refused(cli, "index", tmp_path / "photo.png", "--into", into)
    assert "nothing" in refused(cli, "index", tmp_path / "folder", "--into", into)
    assert "does not exist" in refused(cli, "index", tmp_path / "none.txt", "--into", into)
    assert not into.exists()


def test_few_of_many_skipped_files_are_named_and_the_others_counted(index, cli, notes, into):
    for number in range(13):
        (notes / f"broken{number:02}.txt").symlink_to(notes / "nowhere")
    outcome = cli("index", notes, "--into", into, *OPTIONS, "--json")
    *named, counted = outcome.stderr.splitlines()
    assert sum("is a broken link" in line for line in named) == len(named) == 10
    assert counted == "warning: 3 more files skipped: --json names all, with the reasons"
    assert (outcome.code, len(outcome.json["skipped"])) == (0, 13)


def test_only_unreadable_files_end_in_an_error(cli, tmp_path, into, letters):
    (tmp_path / "empty.txt").write_text("")
    outcome = cli("index", tmp_path / "empty.txt", "--into", into, "--model", TOY)
    assert outcome.code == 2
    assert outcome.stderr.splitlines()[0].startswith("warning:")
    assert "nothing could be indexed" in outcome.stderr.splitlines()[1]


@pytest.mark.parametrize("part", ["precompute", "embed"])
def test_after_ctrl_c_the_same_command_goes_on(cli, index, tmp_path, into, monkeypatch, part):
    """Interrupted when the KV of the file in work is stored, or when none of it is."""
    owner = TransformersEngine if part == "precompute" else LetterEmbedder
    whole, calls = getattr(owner, part), iter(range(6))

    def interrupted(*arguments, **options):
        done = whole(*arguments, **options)
        if next(calls, None) is None:
            monkeypatch.setattr(owner, part, whole)
            raise KeyboardInterrupt
        return done

    write_notes(tmp_path / "notes", count=12)
    monkeypatch.setattr(owner, part, interrupted)
    arguments = ("index", tmp_path / "notes", "--into", into, "--model", TOY)
    outcome = cli(*arguments, *OPTIONS[2:], "--json")
    assert (outcome.code, outcome.stdout) == (130, "")
    assert outcome.stderr.startswith("interrupted: ")
    finished, kv = texts(into), stored_kv(into)
    assert 0 < len(finished) < 12
    assert (len(kv) > sum(map(len, finished.values()))) == (part == "precompute")
    found = index(tmp_path / "notes")
    assert (found["unchanged"], found["added"]) == (len(finished), 12 - len(finished))
    assert found["computed_chunks"] == found["chunks"] - len(kv)
    assert kv < stored_kv(into)


def test_after_a_kill_the_same_command_goes_on(cli, tmp_path, into):
    folder = tmp_path / "notes"
    write_notes(folder, count=40)
    command = [sys.executable, "-c", "from cacheblend_rag.cli.main import app; app()"]
    arguments = ["index", folder, "--into", into, *OPTIONS]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while documents_in(into) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished, kv = texts(into), stored_kv(into)
    assert 2 <= len(finished) < 40
    left = [path for path in sorted(folder.iterdir()) if f"notes/{path.name}" not in finished]
    for path in left[3:]:  # three show it as well as all
        path.unlink()
    found = cli(*arguments, "--json").json
    assert (found["unchanged"], found["added"]) == (len(finished), len(left[:3]))
    assert texts(into).items() >= finished.items()
    assert kv <= stored_kv(into)
    assert cli("store", "verify", into / KV_NAME).code == 0


def test_other_settings_are_refused_until_rebuilt(cli, index, notes, into, small_model):
    index(notes)
    changes = ("--model", small_model), ("--set", "chunk_size=32"), ("--set", "namespace=x")
    for option, value in changes:
        line = refused(cli, "index", notes, "--into", into, option, value)
        assert (
            f"was indexed with {str(value).partition('=')[0] if option == '--set' else 'model'}"
            in line
        )
        assert "--rebuild" in line
    found = cli("index", notes, "--into", into, "--model", small_model, "--rebuild", "--json").json
    assert found["added"] == 4
    with Collection(into) as collection:
        assert collection.settings.model == str(small_model)
        assert collection.settings.instruction == INSTRUCTION
        assert collection.settings.chunk_size == CHUNK_SIZE
    assert len(stored_kv(into)) == found["chunks"]


def test_a_rebuild_with_a_model_that_does_not_load_deletes_nothing(cli, index, notes, into):
    index(notes)
    before = texts(into)
    (notes / "folder").mkdir()
    (notes / "folder" / "config.json").write_text("{}")
    arguments = ("index", notes, "--into", into, "--model", notes / "folder", "--rebuild")
    assert "could not be loaded" in refused(cli, *arguments)
    assert texts(into) == before


def test_a_model_whose_weights_changed_is_refused(cli, notes, into, small_model, letters, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(small_model, model)
    assert cli("index", notes, "--into", into, "--model", model).code == 0
    shutil.copytree(small_model, model, dirs_exist_ok=True)
    halve_weights(model)
    (notes / "new.txt").write_text("New text.")
    for arguments in (("index", notes, "--into", into), ("ask", "Who?", "--from", into)):
        assert "--rebuild" in refused(cli, *arguments)


def halve_weights(model):
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    save_file({n: w / 2 for n, w in load_file(path).items()}, path, metadata={"format": "pt"})


def test_a_damaged_collection_is_refused_until_rebuilt(cli, index, notes, into):
    index(notes)
    (into / FILE_NAME).write_bytes(b"damaged" * 1000)
    for arguments in (("index", notes, "--into", into), ("ask", "Who?", "--from", into)):
        assert "--rebuild" in refused(cli, *arguments)
    assert index(notes, "--rebuild")["documents"] == 4


def test_one_index_at_a_time(cli, notes, into, letters):
    with sole_writer(into):
        assert "another `index`" in refused(cli, "index", notes, "--into", into, *OPTIONS)


def test_the_collection_may_stand_in_the_folder_it_indexes(cli, notes, letters):
    inside = notes / "collection"
    for added in (4, 0):
        found = cli("index", notes, "--into", inside, "--model", TOY, "--json").json
        assert (found["added"], found["unknown"]) == (added, 0)


def test_a_collections_engine_is_settled(cli, indexed):
    folder, questions = indexed
    notes = folder.parent / "notes"
    outcome = cli("index", notes, "--into", folder, "--model", TOY, "--engine", "vllm")
    assert outcome.code == 2
    assert "engine" in outcome.stderr
    url = "http://127.0.0.1:9"
    outcome = cli("ask", questions[0].question, "--from", folder, "--engine", url)
    assert outcome.code == 2
    assert "no server answers there" in outcome.stderr


def test_kv_that_no_document_knows_is_found_and_removed(cli, index, notes, into):
    index(notes)
    known = stored_kv(into)
    disk = DiskTier(into / KV_NAME)
    some = min(known, key=str)
    lost = replace(some, chunk_id="0" * 32, context_id="")
    assert disk.put(lost, StoredChunk(TieredKVStore([disk]).get(some).kv, time.time()))
    assert index("--repair")["evicted_chunks"] == 1
    assert stored_kv(into) == known


def test_a_repair_drops_no_kv_of_other_collections_in_a_shared_tier(cli, notes, tmp_path, letters):
    shared = ("--set", f"tiers=disk://{tmp_path / 'shared'}", "--json")
    (tmp_path / "other.txt").write_text("A text of another collection.")
    for path, name in ((notes, "one"), (tmp_path / "other.txt", "two")):
        made = cli("index", path, "--into", tmp_path / name, *OPTIONS, *shared)
        assert made.code == 0, made.stderr
    repair = ("index", "--repair", *shared, "--into")
    found = [cli(*repair, tmp_path / name).json for name in ("two", "one")]
    assert [(one["evicted_chunks"], one["computed_chunks"]) for one in found] == [(0, 0)] * 2
