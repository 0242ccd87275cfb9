"""A stranger's document never answers for another document that holds the same passage.

Prefixes that a search has found are stored before the passages that they attack; SmolLM2 is asked
over the passages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.benchmarks.hijack import FOUND, Victim, read_attacks

ATTACKS = read_attacks(FOUND)[:10]


@pytest.fixture(scope="module")
def victim(smollm2_folder: Path) -> Iterator[Victim]:
    opened = Victim()
    with closing(opened.engine):
        yield opened


def test_an_upload_answers_for_no_other_document(victim: Victim) -> None:
    victim.store(attack.manual for attack in ATTACKS)
    absent = victim.fooled(ATTACKS, ratio=0.0)
    victim.store(attack.upload for attack in ATTACKS)
    assert victim.fooled(ATTACKS, ratio=0.0) <= absent
    # The attack is real: who asks for the strangers' documents gets their answers.
    of_uploads = victim.fooled(ATTACKS, 0.0, hint=lambda attack: attack.upload.document_id)
    assert of_uploads >= absent + len(ATTACKS) // 2
