"""Reading several objects at once: what is wrong with one of them holds no other up."""

import subprocess
import sys
import textwrap

from cacheblend_rag.kv.tiers.object_client import FORKED


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
