"""Which names are folders' and which hub names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag import TransformersEngine, load_tokenizer, models
from cacheblend_rag.errors import ModelLoadError
from tests.models import make_tokenizer
from tests.toy import TOY


def test_a_folder_goes_by_its_last_part() -> None:
    assert models.public_name(TOY) == "toy"
    assert Path(models.resolve(TOY), "config.json").is_file()
    engine = TransformersEngine(TOY)
    assert engine.model_name == "toy"
    assert engine.generate("Question:").prompt_tokens
    assert load_tokenizer(TOY).vocab_size == engine.tokenizer.vocab_size


@pytest.mark.parametrize(
    "name", ["./nofolder", "/no/folder", "~/nofolder", "path/to/model", "a\\b"]
)
def test_a_folder_that_is_not_there_is_called_that(name: str) -> None:
    for load in (TransformersEngine, load_tokenizer):
        with pytest.raises(ModelLoadError) as failure:
            load(name)
        assert str(failure.value) == f"model={name!r}: there is no such folder"


def test_a_hub_name_that_cannot_be_had_says_that_there_is_no_such_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="from a hub, and there is no such folder") as error:
        TransformersEngine("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_link_stays_the_link_when_its_name_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub's cache links names to files that are called by their hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f3a").touch()
    (tmp_path / "model.gguf").symlink_to("blobs/0f3a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model.gguf", "blobs/../model.gguf", "~/model.gguf"):
        assert models.absolute(name) == str(tmp_path / "model.gguf")
        assert models.public_name(models.absolute(name)) == "model"
    assert models.absolute("nobody/nothing") == "nobody/nothing"


def test_a_folder_with_a_tokenizer_alone_is_enough_for_the_tokenizer(tmp_path: Path) -> None:
    """An engine on a server needs no more than that here."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ModelLoadError, match="the folder holds no config"):
        TransformersEngine(tmp_path)
