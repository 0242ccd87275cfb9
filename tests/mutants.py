"""A random sample of mutants of the core, and which of them the fast tests let live.

``make mutants [SAMPLE=300] [SEED=1]``. mutmut changes the code in one small way at a time and runs
the tests that reach the changed function; what survives is printed as a diff. A survivor that
changes nothing is named, with the reason, in ``equivalent_mutants.toml``: by its function and the
lines of its diff, since mutants' numbers move whenever a function is edited.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut import __main__ as mutmut
from mutmut.mutation.trampoline import set_mutant_under_test

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
LOG = Path("mutants/log.txt")
DEAD = {"killed", "timeout", "segfault", "caught by type check"}


def all_mutants(processes: int) -> dict[str, Path]:
    """Make every mutant; returns their names, in order, with the files that they are of."""
    set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    mutmut.create_mutants(processes)
    return {name: path for path in mutmut.walk_mutatable_files() for name in sorted(outcomes(path))}


def outcomes(path: Path) -> dict[str, str]:
    """What became of each mutant of a file, as far as it was tried."""
    data = mutmut.SourceFileMutationData(path=path)
    data.load()
    return {name: mutmut.status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}


def changed_lines(diff: str) -> list[str]:
    """The lines that a mutant takes and gives, without what stands around them."""
    return [
        line[0] + line[1:].strip()
        for line in diff.splitlines()
        if line[:1] in {"-", "+"} and line[:3] not in {"---", "+++"}
    ]


def named_equivalent(name: str, diff: str) -> str | None:
    """Return why a mutant changes nothing, where that is known."""
    function = name.rpartition("__mutmut_")[0]
    for known in tomllib.loads(EQUIVALENT.read_text())["mutant"]:
        if known["function"] == function and known["lines"] == changed_lines(diff):
            return str(known["why"])
    return None


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sample", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--processes", type=int, default=2)
    chosen = options.parse_args()
    files = all_mutants(chosen.processes)
    draw = random.Random(chosen.seed)
    sample = draw.sample(sorted(files), min(chosen.sample, len(files)))
    command = [sys.executable, "-m", "mutmut", "run"]
    command += ["--max-children", str(chosen.processes), *sample]
    with LOG.open("w") as log:  # it draws itself anew ten times a second
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            sys.exit(f"mutmut failed, see {LOG}")
    return report(sorted(sample), files)


def report(sample: list[str], files: dict[str, Path]) -> int:
    """Print what lives and how many die; returns 1 where a survivor is not named."""
    of_file = {path: outcomes(path) for path in {files[name] for name in sample}}
    found = {name: of_file[files[name]][name] for name in sample}
    unnamed = 0
    for name in (name for name, outcome in found.items() if outcome not in DEAD):
        diff = mutmut.get_diff_for_mutant(name, path=files[name])
        why = named_equivalent(name, diff)
        unnamed += why is None
        print(f"\n# {name}: {found[name]}{f' (equivalent: {why})' if why else ''}\n{diff}")
    dead = sum(outcome in DEAD for outcome in found.values())
    print(f"\n{dict(Counter(found.values()))}")
    share = f"{dead} of {len(sample)} mutants die ({dead / len(sample):.0%})"
    print(f"{share}, {unnamed} of the survivors are not named as equivalent")
    return int(unnamed > 0)


if __name__ == "__main__":
    sys.exit(main())
