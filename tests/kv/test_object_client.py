"""Reading several objects at once: what is wrong with one of them holds no other up."""

import subprocess
import sys
import textwrap

import pytest

from cacheblend_rag.kv.tiers.object_client import FORKED, ObjectClient, open_store


@pytest.fixture
def client():
    made = ObjectClient(open_store("memory://"))
    for path, size in {"one": 3, "large": 11, "empty": 0}.items():
        made.put(path, [bytes(size)])
    return made


def test_each_object_has_its_own_answer(client):
    paths = ["one", "missing", "large", "empty", "one"]
    one, missing, large, empty, again = client.read_many(paths, 10)
    assert (one, missing, empty, again) == (bytes(3), None, b"", bytes(3))
    assert str(large) == "large has 11 bytes, of at most 10"
    assert client.read_many([], 10) == []


def test_what_is_not_there_is_deleted_without_an_error(client):
    client.delete("missing")
    client.delete("one")
    assert sorted(meta["path"] for page in client.pages() for meta in page) == [
        "empty", "large",
    ]  # fmt: skip


def test_a_fork_of_a_process_that_used_it_is_told_so_at_once(tmp_path):
    """Its requests would wait for threads that only the parent has, until their deadline."""
    program = """
        import os, sys
        from cacheblend_rag.errors import StoreError
        from cacheblend_rag.kv.tiers.object_client import ObjectClient, open_store
        url = f"file://{sys.argv[1]}"
        store = open_store(url)
        for used in (False, True):
            if used:
                ObjectClient(store).put("one", [b"1"])
            if not (pid := os.fork()):
                try:
                    ObjectClient(open_store(url)).put("two", [b"2"])
                    print("written", flush=True)
                except StoreError as error:
                    print(error, flush=True)
                os._exit(0)
            os.waitpid(pid, 0)
        """
    run = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert told.splitlines() == ["written", f"file://{tmp_path}: {FORKED}"]
