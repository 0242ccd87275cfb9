from __future__ import annotations

import pytest

from cacheblend_rag.demo.corpus import generate_collection
from cacheblend_rag.rag.toy_vocabulary import first_foreign, is_foreign


def test_none_of_the_demos_own_texts_is_foreign():
    documents, _ = generate_collection(40, 10, seed=5)
    assert first_foreign((one.document_id, one.chunks) for one in documents) is None


@pytest.mark.parametrize(
    "text",
    [
        "To replace the filter, unscrew the lid and rinse it under warm water.",
        "Der Filter wird einmal in der Woche gewechselt.",
        "def main(): return 0",
        "濾芯每週更換一次。",
    ],
)
def test_other_texts_are(text):
    assert is_foreign(text)
    assert first_foreign([("a", ["The river is cold."]), ("b", [text]), ("c", [text])]) == "b"


def test_a_text_without_words_is_not():
    assert not is_foreign("--- ***")
