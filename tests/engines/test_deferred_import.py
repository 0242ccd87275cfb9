from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.engines import quiet_import
from cacheblend_rag.engines.deferred_import import PackageDistributions, deferred
from cacheblend_rag.engines.quiet_import import without_unused
from tests.toy import TOY

IMPORTER = "from deferral_heavy import Kind, make\nfrom deferral_heavy.below import Other\n"
HEAVY = "class Kind: pass\ndef make(value): return ('made', value)\n"
UNNEEDED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


def printed(code: str, *arguments: str) -> str:
    """Run a program in a new process; returns what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library whose module takes names of a heavy one, imported while that is deferred."""
    for folder, files in {
        "deferral_library": {"__init__.py": "", "user.py": IMPORTER},
        "deferral_other": {"__init__.py": IMPORTER},
        "deferral_heavy": {"__init__.py": HEAVY, "below.py": "class Other: pass\n"},
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with deferred("deferral_library", {"deferral_heavy"}, {}):
        yield import_module("deferral_library.user")
    for name in [name for name in sys.modules if name.startswith("deferral_")]:
        del sys.modules[name]


def test_a_deferred_module_is_imported_when_a_name_is_called(library):
    assert "deferral_heavy" not in sys.modules
    assert library.make(3) == ("made", 3)
    assert "deferral_heavy" in sys.modules


def test_nothing_is_an_instance_before_its_class_is_imported(library):
    assert not isinstance(3, library.Kind)
    assert not issubclass(int, library.Other)
    assert "deferral_heavy" not in sys.modules
    real = import_module("deferral_heavy").Kind
    assert isinstance(real(), library.Kind)
    assert issubclass(real, library.Kind)


def test_a_deferred_class_can_be_subclassed_and_part_of_a_type(library):
    class Below(library.Kind):
        pass

    assert import_module("deferral_heavy").Kind in Below.__mro__
    assert (library.Other | None) == (import_module("deferral_heavy.below").Other | None)


def test_other_libraries_get_the_real_names(library):
    other = import_module("deferral_other")
    assert other.Kind is import_module("deferral_heavy").Kind


def test_names_are_real_again_afterwards(library):
    own = __import__
    with deferred("deferral_library", {"deferral_heavy"}, {}):
        assert __import__ is not own
    assert __import__ is own


def test_threads_may_load_models_at_the_same_time(monkeypatch):
    import torch

    own_command = threading.Event()
    own_command.set()
    monkeypatch.setattr(quiet_import, "_own_command", own_command)

    own = __import__, torch.compiler.disable
    with without_unused():
        first, second = without_unused(), without_unused()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert __import__ is not own[0]
        second.__exit__(None, None, None)
    assert (__import__, torch.compiler.disable) == own


def test_a_program_that_uses_the_package_gets_all_of_transformers():
    own = __import__
    with without_unused():
        assert __import__ is own


def test_a_package_is_found_by_its_own_name_without_listing_files():
    def never() -> dict[str, list[str]]:
        raise AssertionError("files were listed")

    found = PackageDistributions(never)
    assert found.get("torch") == ["torch"]
    assert found.get("no_such_package", []) == []


def test_a_package_with_another_distribution_is_looked_up_in_all_files():
    listed = importlib.metadata.packages_distributions()
    found = PackageDistributions(importlib.metadata.packages_distributions)
    assert found["yaml"] == listed["yaml"]
    assert dict(found) == listed


def test_a_model_loads_and_answers_without_compiler_and_tensor_parallelism():
    code = f"""
import sys
from cacheblend_rag.engines.quiet_import import is_own_command, quiet_libraries
is_own_command()
quiet_libraries()
import cacheblend_rag
engine = cacheblend_rag.open_engine("transformers", model="{TOY}")
assert engine.blend_refusal is None
engine.generate("Where is Egypt?")
print([name for name in {UNNEEDED} if name in sys.modules])
import torch
disabled = torch.compiler.disable(len)
assert "torch._dynamo" in sys.modules and disabled("abc") == 3
import gc
assert gc.isenabled()
from transformers.distributed import tensor_parallel
assert tensor_parallel.DTensor.__module__ == "torch.distributed.tensor"
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "[]\n"), found.stderr


def test_transformers_knows_the_same_names_as_when_imported_ordinarily():
    code = """
import sys
if sys.argv[1:]:
    from cacheblend_rag.engines.quiet_import import is_own_command, quiet_libraries
    is_own_command()
    quiet_libraries()
import transformers
print(sorted(transformers._class_to_module.items()))
"""
    ordinary, quiet = (
        subprocess.run(
            [sys.executable, "-c", code, *extra], capture_output=True, text=True, check=False
        )
        for extra in ((), ("quiet",))
    )
    assert "LlamaForCausalLM" in ordinary.stdout
    assert quiet.stdout == ordinary.stdout
