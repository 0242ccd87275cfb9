from __future__ import annotations

import pytest

from cacheblend_rag.demo.notes import DOCUMENTS, draw_notes


def test_notes_are_the_same_each_time_and_hold_the_answers():
    notes = draw_notes(8)
    assert notes == draw_notes(8)
    assert (len(notes.documents), len(notes.questions)) == (DOCUMENTS, 8)
    for asked in notes.questions:
        assert asked.answer in notes.documents[asked.document].chunks[asked.chunk]


def test_each_note_is_a_file_of_a_new_folder(tmp_path):
    notes = draw_notes(1)
    notes.save(tmp_path / "one" / "notes")
    files = {file.stem: file.read_text() for file in (tmp_path / "one" / "notes").iterdir()}
    assert files == {d.document_id: "\n\n".join(d.chunks) + "\n" for d in notes.documents}
    with pytest.raises(FileExistsError):
        notes.save(tmp_path / "one" / "notes")
