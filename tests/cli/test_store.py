import json
import time

import pytest
import torch
from typer.testing import CliRunner

from cacheblend_rag.cli.main import app
from cacheblend_rag.kv import ChunkKV, DiskTier, KVKey, StoredChunk, chunk_id, fingerprint

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
    """Run ``store ARGUMENTS --kv-path FOLDER``."""
    return lambda *arguments, **options: run(*arguments, "--kv-path", str(folder), **options)


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


def test_stats_count_in_all_and_by_fingerprint(store, folder):
    result = printed(store("stats", "--json"))
    sizes = [path.stat().st_size for path in folder.glob("??/*")]
    assert (result["entries"], result["bytes"], result["quarantined"]) == (3, sum(sizes), 0)
    assert result["fingerprints"][ONE]["entries"] == 2
    assert result["fingerprints"][TWO] == {"entries": 1, "bytes": sizes[0]}
    assert result["tiers"]["disk"]["entries"] == 3
    assert {"hits", "misses", "evictions", "errors"} <= result["tiers"]["disk"].keys()
    assert "disk tier" in store("stats").stdout


def test_ls_gives_whole_keys_sizes_and_times(store):
    chunks = printed(store("ls", "--json"))["chunks"]
    assert [chunk["key"] for chunk in chunks] == [str(key) for key in KEYS]
    assert chunks[0]["written_at"] == pytest.approx(time.time() - 5000, abs=30)
    assert chunks[0]["used_at"] == pytest.approx(time.time(), abs=30)
    assert all(str(key) in store("ls").stdout for key in KEYS)


def test_verify_names_damage_exits_1_and_moves_it_only_on_repair(store, folder):
    damage(folder, KEYS[1])
    for arguments, quarantined in ([], 0), (["--repair"], 1):
        result = store("verify", "--json", *arguments)
        assert result.exit_code == 1
        found = printed(result)
        (of,) = found["damaged"]
        assert of["key"] == str(KEYS[1])
        assert "checksum" in of["reason"]
        assert found["quarantined"] == quarantined
    assert store("verify").exit_code == 0
    assert printed(store("stats", "--json"))["quarantined"] == 1


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ([str(KEYS[0])], {0}),
        ([str(KEYS[0]), str(KEYS[2])], {0, 2}),
        ([str(KVKey(chunk_id([99]), ONE))], set()),
        (["--fingerprint", ONE], {0, 1}),
        (["--older-than", "1000"], {0}),
        (["--older-than", "1000", "--fingerprint", TWO], set()),
        (["--all", "--yes"], {0, 1, 2}),
    ],
)
def test_evict_removes_what_was_chosen(store, folder, arguments, gone):
    result = store("evict", *arguments, "--json")
    assert result.exit_code == 0
    assert printed(result)["evicted"] == len(gone)
    assert remaining(folder) == set(KEYS) - {KEYS[number] for number in gone}


@pytest.mark.parametrize(("answer", "left", "code"), [("y\n", 0, 0), ("n\n", 3, 1), ("", 3, 1)])
def test_evict_all_asks_first_and_not_on_stdout(store, folder, answer, left, code):
    result = store("evict", "--all", "--json", input=answer)
    assert result.exit_code == code
    assert "?" in result.stderr
    assert len(remaining(folder)) == left
    assert "?" not in result.stdout


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
    for command in (["stats"], ["ls"], ["verify"], ["evict", "--all", "--yes"]):
        result = run(*command, "--kv-path", str(tmp_path))
        assert result.exit_code == 2
        assert "is not a store of chunk KV" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_chunks_are_chosen_by_namespace_and_age(store, folder):
    assert len(printed(store("ls", "--json", "--namespace", "default"))["chunks"]) == 3
    assert printed(store("ls", "--json", "--namespace", "other"))["chunks"] == []
    (old,) = printed(store("ls", "--json", "--older-than", "1000"))["chunks"]
    assert old["key"] == str(KEYS[0])
    assert printed(store("evict", "--json", "--newer-than", "1000"))["evicted"] == 2
    assert remaining(folder) == {KEYS[0]}


@pytest.mark.parametrize("command", ["stats", "ls"])
def test_who_only_looks_writes_nothing(store, folder, command):
    def seen():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}

    before = seen()
    assert store(command).exit_code == 0
    assert seen() == before


def test_warm_tells_what_it_brought(store):
    result = printed(store("warm", "--json"))
    assert (result["there"], result["warmed"], result["left"]) == (3, 0, 0)


def test_a_store_may_be_a_list_of_tiers(folder, tmp_path_factory):
    fast = tmp_path_factory.mktemp("fast")
    urls = ("host://?capacity=1GiB", f"disk://{fast}?name=fast", f"disk://{folder}?name=slow")
    tiers = [part for url in urls for part in ("--store", f"tiers={url}")]
    result = printed(run("stats", "--json", *tiers))
    assert {name: of["entries"] for name, of in result["tiers"].items()} == {"fast": 0, "slow": 3}
    assert printed(run("warm", "--json", *tiers))["warmed"] == 3
    assert remaining(fast) == set(KEYS)
    assert printed(run("evict", str(KEYS[0]), "--json", *tiers))["evicted"] == 1
    assert remaining(fast) == remaining(folder) == set(KEYS[1:])
