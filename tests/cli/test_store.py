"""``store``: what it shows, removes, pins and copies."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from cacheblend_rag.cli.main import app
from cacheblend_rag.kv import ChunkKV, DiskTier, KVKey, StoredChunk, chunk_id, fingerprint
from tests.admin.test_select import ONE as PAINTER
from tests.admin.test_select import TWO as ROME
from tests.admin.test_select import indexed, keys
from tests.toy import TOY

ONE, TWO = fingerprint({"model": 1}), fingerprint({"model": 2})
KEYS = [KVKey(chunk_id([number]), of) for number, of in enumerate([ONE, ONE, TWO])]
AGES = [5000, 50, 50]


@pytest.fixture
def folder(tmp_path):
    """A store of two chunks of one model and one of another; the first is old."""
    tier = DiskTier(tmp_path)
    for key, age in zip(KEYS, AGES, strict=True):
        kv = ChunkKV.of(torch.rand(2, 1, 4, 8), torch.rand(2, 1, 4, 8), 1)
        assert tier.put(key, StoredChunk(kv, time.time() - age))
    return tmp_path


@pytest.fixture
def store(folder):
    """Run ``store COMMAND FOLDER ARGUMENTS``."""
    return lambda name, *arguments, **options: run(name, str(folder), *arguments, **options)


def run(*arguments, **options):
    return CliRunner().invoke(app, ["store", *arguments], **options)


def printed(result):
    """The one JSON object on stdout."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def remaining(folder):
    return {key for key, _ in DiskTier(folder).entries()}


def damage(folder, key):
    (path,) = folder.glob(f"??/{key}.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_there_is_counted_listed_and_left_as_it_was(store, folder):
    def seen():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}

    before = seen()
    result = printed(store("stats", "--json"))
    sizes = [path.stat().st_size for path in folder.glob("??/*")]
    assert (result["entries"], result["bytes"], result["quarantined"]) == (3, sum(sizes), 0)
    assert result["fingerprints"][TWO] == {"entries": 1, "bytes": sizes[0]}
    assert {"hits", "misses", "evictions", "errors"} <= result["tiers"]["disk"].keys()
    assert "disk tier" in store("stats").stdout
    chunks = printed(store("ls", "--json"))["chunks"]
    assert chunks[0]["written_at"] == pytest.approx(time.time() - 5000, abs=30)
    assert chunks[0]["used_at"] == pytest.approx(time.time(), abs=30)
    assert all(str(key) in store("ls").stdout for key in KEYS)
    assert seen() == before


@pytest.mark.parametrize(
    ("only", "gone"),
    [
        ([f"key={KEYS[0]}"], {0}),
        ([f"key={KVKey(chunk_id([99]), ONE)}"], set()),
        ([f"fingerprint={ONE}"], {0, 1}),
        (["older_than=1000"], {0}),
        (["newer_than=15m"], {1, 2}),
        (["older_than=1000", f"fingerprint={TWO}"], set()),
        (["namespace=default"], {0, 1, 2}),
        (["namespace=other"], set()),
    ],
)
def test_what_was_chosen_is_listed_and_evicted(store, folder, only, gone):
    given = [part for text in only for part in ("--only", text)]
    listed = printed(store("ls", *given, "--json"))["chunks"]
    assert {chunk["key"] for chunk in listed} == {str(KEYS[number]) for number in gone}
    result = store("evict", *given, "--json")
    assert result.exit_code == 0
    assert printed(result)["evicted"] == len(gone)
    assert remaining(folder) == set(KEYS) - {KEYS[number] for number in gone}


@pytest.mark.parametrize(("answer", "left", "code"), [("y\n", 0, 0), ("n\n", 3, 1), ("", 3, 1)])
def test_evict_of_all_asks_first_and_not_on_stdout(store, folder, answer, left, code):
    result = store("evict", "--json", input=answer)
    assert result.exit_code == code
    assert "?" in result.stderr
    assert len(remaining(folder)) == left
    assert "?" not in result.stdout
    assert store("evict", "--yes").exit_code == 0
    assert not remaining(folder)


def test_the_folder_may_come_from_the_environment(folder):
    result = run("stats", "--json", env={"CACHEBLEND_KV_PATH": str(folder)})
    assert printed(result)["entries"] == 3
    assert run("stats", env={"CACHEBLEND_KV_PATH": None}).exit_code == 2


def test_the_folder_is_the_default_collections_otherwise(folder, monkeypatch, tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    (project / ".cacheblend").mkdir()
    (project / ".cacheblend" / "kv").symlink_to(folder)
    monkeypatch.chdir(project)
    monkeypatch.delenv("CACHEBLEND_KV_PATH", raising=False)
    result = run("verify", "--json")
    assert (result.exit_code, printed(result)["checked"], printed(result)["damaged"]) == (0, 3, [])


def test_what_is_no_store_is_left_as_it_is(tmp_path):
    (tmp_path / "report.txt").write_text("A report.")
    for command in (["stats"], ["ls"], ["verify"], ["evict", "--yes"]):
        result = run(*command, str(tmp_path))
        assert result.exit_code == 2
        assert "is not a store of chunk KV" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_a_store_may_be_a_list_of_tiers(folder, tmp_path_factory):
    fast = tmp_path_factory.mktemp("fast")
    given = ("host://?capacity=1GiB", f"disk://{fast}?name=fast", f"disk://{folder}?name=slow")
    assert run("stats", *given).exit_code == 2, "there is nothing in fast yet"
    copied = printed(run("copy", str(folder), str(fast), "--json"))
    assert copied["copied"] == 3
    result = printed(run("stats", "--json", *given))
    assert {name: of["entries"] for name, of in result["tiers"].items()} == {"fast": 3, "slow": 3}
    assert printed(run("evict", "--only", f"key={KEYS[0]}", "--json", *given))["evicted"] == 1
    assert remaining(fast) == remaining(folder) == set(KEYS[1:])


def test_the_latest_used_are_copied_as_far_as_there_is_room(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    size = DiskTier(folder).entry(KEYS[0]).nbytes
    bounded = f"disk://{target}?capacity={int(2.5 * size)}"
    first = printed(run("copy", str(folder), bounded, "--only", f"key={KEYS[0]}", "--json"))
    assert first == {"copied": 1, "there": 0, "failed": 0, "left": 0, "bytes": size}
    told = printed(run("copy", str(folder), bounded, "--json"))
    assert (told["copied"], told["there"], told["left"]) == (1, 1, 1)
    assert len(remaining(target)) == 2
    ages = {key: time.time() - entry.written_at for key, entry in DiskTier(target).entries()}
    assert ages[KEYS[0]] == pytest.approx(5000, abs=60), "its age is copied, too"


def test_what_is_damaged_is_not_copied(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    damage(folder, KEYS[1])
    result = run("copy", str(folder), str(target), "--json")
    assert (result.exit_code, printed(result)["copied"], printed(result)["failed"]) == (1, 2, 1)
    assert len(remaining(folder)) == 3, "the source is only read"


def test_copies_need_two_tiers_that_last(folder):
    for places, said in (
        ((folder, "host://"), "what is in memory ends with this command"),
        (("nowhere", folder), "is not a folder"),
    ):
        result = run("copy", *map(str, places))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert said in result.stderr


def test_pins_are_taken_of_documents_and_all_let_go(tmp_path):
    engine = indexed(tmp_path, PAINTER, ROME)
    wanted = keys(engine, PAINTER)
    engine.close()

    def pin(*given):
        return run("pin", str(tmp_path), *given, "--json")

    def of(document):
        return "--only", f"document={document}", "--only", f"model={TOY}"

    assert printed(pin(*of("one"))) == {"path": str(tmp_path), "pinned": len(wanted)}
    assert DiskTier(tmp_path).pinned() == wanted
    DiskTier(tmp_path).pin(KVKey("0" * 32, "0" * 64))
    assert printed(pin("--undo"))["unpinned"] == len(wanted) + 1, "one that is gone, too"
    for given, said in (
        ((), "give --only document=ID and --only model=NAME, or --undo"),
        (of("three"), "knows no document 'three'"),
    ):
        result = pin(*given)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert said in result.stderr
