"""Chunks of a document, a model, a namespace: named without the model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, Document, Engine, open_engine
from cacheblend_rag.admin import inspect
from cacheblend_rag.admin.inspect import Choice
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import KVKey
from tests.toy import TOY

SHARED = "Her pet is a dog."
ONE = Document("one", ("Clara Berg is a painter.", "Her pet is a cat.", SHARED))
TWO = Document("two", (SHARED, "Mary Stone lives in Rome."))


def indexed(folder: Path, *documents: Document, **options: object) -> Engine:
    engine = open_engine("transformers", model=TOY, config=BlendConfig(), kv_path=folder, **options)
    engine.precompute(documents, progress=False)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    """Two namespaces, one of them with two lead-ins, in one folder."""
    made = {
        "default": indexed(folder, ONE, TWO),
        "alone": indexed(folder, ONE, TWO, lead_in="instruction"),
        "other": indexed(folder, ONE, namespace="other"),
    }
    yield made
    for engine in made.values():
        engine.close()


def chosen(folder: Path, choice: Choice, *, spare: bool = False) -> set[KVKey]:
    with inspect.opened([str(folder)]) as found:
        return {key for key, _ in found.by_use(choice, spare=spare)}


def keys(engine: Engine, *documents: Document) -> set[KVKey]:
    return {engine.key(chunk) for document in documents for chunk in document.to_chunks()}


def test_a_namespaces_chunks_are_chosen(folder: Path, engines: dict[str, Engine]) -> None:
    assert chosen(folder, Choice(namespace="other")) == keys(engines["other"], ONE)
    assert chosen(folder, Choice(namespace="nobody")) == set()


def test_a_documents_chunks_are_those_its_engines_stored(
    folder: Path, engines: dict[str, Engine]
) -> None:
    everywhere = set[KVKey]().union(*(keys(engine, ONE) for engine in engines.values()))
    assert chosen(folder, Choice(document="one", model=TOY)) == everywhere
    here = Choice(document="one", model=TOY, namespace="other")
    assert chosen(folder, here) == keys(engines["other"], ONE)


def test_what_other_documents_share_is_spared(folder: Path, engines: dict[str, Engine]) -> None:
    default, alone = engines["default"], engines["alone"]
    found = chosen(folder, Choice(document="two", model=TOY, namespace="default"), spare=True)
    assert default.key(TWO.to_chunks()[0]) in found  # behind another context than in the other one
    assert alone.key(TWO.to_chunks()[0]) not in found  # the same KV
    assert keys(alone, TWO) - found == {alone.key(TWO.to_chunks()[0])}


def test_a_models_chunks_are_chosen_by_its_name(folder: Path, engines: dict[str, Engine]) -> None:
    with inspect.opened([str(folder)]) as found:
        count = found.count()
    assert set(count["models"].values()) == {"toy"}
    assert set(count["models"]) == {engine.fingerprint for engine in engines.values()}
    assert len(chosen(folder, Choice(model=TOY))) == count["entries"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(model="another"), "no chunk in .* is recorded for model 'another'"),
        (Choice(document="one"), "give --only model, too"),
        (Choice(document="three", model=TOY), "knows no document 'three'"),
    ],
)
def test_what_the_folder_does_not_tell_is_said(
    folder: Path, engines: dict[str, Engine], choice: Choice, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        chosen(folder, choice)


def test_a_file_that_is_no_label_is_none(tmp_path: Path) -> None:
    indexed(tmp_path, ONE).close()
    (label,) = (tmp_path / "models").iterdir()
    good = label.read_text()
    for text in ("", "[]", "{}", good.replace('"toy"', "7"), good.replace("2048", "-1")):
        label.write_text(text)
        with pytest.raises(StoreError, match="no chunk in"):
            chosen(tmp_path, Choice(model=TOY))
    label.write_text(good)
    assert len(chosen(tmp_path, Choice(model=TOY))) == 3
