"""GGUF files are converted into folders that compute the same, once; others are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from transformers import AutoModelForCausalLM

from cacheblend_rag import (
    ModelLoadError,
    SamplingParams,
    TransformersEngine,
    load_tokenizer,
    models,
)
from tests.model_names.tiny_gguf import CONTROL, VOCABULARY, tiny_llama, write_gguf

TOKENS = torch.randint(0, len(VOCABULARY), (1, 40), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def load(name: object, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(models.resolve(str(name)), dtype=dtype).eval()


def test_a_file_computes_what_its_weights_compute(model_cache: Path, gguf_file: Path) -> None:
    model = load(gguf_file)
    torch.testing.assert_close(logits(model), logits(tiny_llama()), rtol=0, atol=1e-5)
    assert model.config.dtype == torch.float32


def test_quantized_weights_are_stored_in_bfloat16(model_cache: Path, tmp_path: Path) -> None:
    written = tiny_llama()
    file = write_gguf(tmp_path / "tiny.Q8_0.gguf", written, quantized=True)
    halves, whole = load(file, torch.bfloat16), load(file)
    for (name, held), (_, exact) in zip(
        whole.named_parameters(), written.named_parameters(), strict=True
    ):
        step = exact.abs().max() / 127 if exact.ndim == 2 else 0.0
        room = step / 2 + exact.abs() * 2**-8 + 1e-4
        assert ((held - exact).abs() <= room).all(), name
        assert torch.equal(held, halves.get_parameter(name).float())


def test_llama3s_rotary_scaling_is_taken_over(model_cache: Path, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = tiny_llama(rope_parameters=rope)
    plain = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    factors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).tolist()
    assert (factors[0], factors[-1]) == (1, pytest.approx(32))
    file = write_gguf(tmp_path / "scaled.gguf", scaled, rope_factors=factors)
    model = load(file)
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(logits(model), logits(scaled), rtol=0, atol=1e-5)


def test_the_tokenizer_cuts_digits_and_begins_as_the_file_says(
    model_cache: Path, gguf_file: Path
) -> None:
    tokenizer = load_tokenizer(gguf_file)
    assert tokenizer.tokenize("the  12") == ["t", "he", "ĠĠ", "1", "2"]
    assert tokenizer("the").tokens() == ["<|im_start|>", "t", "he"]
    assert tokenizer("the", add_special_tokens=False).tokens() == ["t", "he"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (CONTROL[1], CONTROL[0])
    assert tokenizer.model_max_length == 512
    assert tokenizer("a<|im_end|>", add_special_tokens=False).input_ids[-1] == 2


def test_an_answer_ends_where_the_template_ends_a_turn(
    model_cache: Path, gguf_file: Path, tmp_path: Path
) -> None:
    beyond = write_gguf(tmp_path / "beyond.gguf", tiny_llama(), roles={"eot": len(VOCABULARY)})
    for file in (gguf_file, beyond):  # the list of tokens ends before its end of a turn
        assert load(file).generation_config.eos_token_id == [0, 2]


def test_the_engine_answers_by_it_and_tells_only_its_name(
    model_cache: Path, gguf_file: Path
) -> None:
    engine = TransformersEngine(gguf_file)
    assert engine.model_name == "tiny.F32"
    assert engine.generate("the 12", SamplingParams(max_tokens=3)).prompt_tokens == 6
    by_folder = TransformersEngine(models.resolve(gguf_file))
    assert by_folder.model_name == "tiny.F32"
    assert by_folder.fingerprint == engine.fingerprint


def test_equal_files_are_converted_once_and_changed_ones_again(
    model_cache: Path, gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "other name.gguf"
    shutil.copy(gguf_file, copy)
    first = models.resolve(gguf_file)
    assert models.resolve(copy) == first
    title, shown = "converting tensors of tiny.F32.gguf:", capfd.readouterr().err
    assert shown == f"{title} 0 of 21 (0 %)\n{title} 21 of 21 (100 %)\n"
    assert models.public_name(str(copy)) == "other name"
    write_gguf(copy, tiny_llama(seed=4))
    assert models.resolve(copy) != first
    assert models.resolve(gguf_file) == first
    kept = [folder for folder in model_cache.iterdir() if not folder.name.startswith(".")]
    assert len(kept) == 2


COUNTED = """
import sys, time
from cacheblend_rag.models import gguf, resolve
convert = gguf.convert
def counted(*arguments):
    with open(sys.argv[2], "a") as log:
        log.write("once\\n")
    time.sleep(1)
    convert(*arguments)
gguf.convert = counted
print(resolve(sys.argv[1]))
"""


def test_two_processes_at_once_convert_it_once(
    model_cache: Path, gguf_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", COUNTED, str(gguf_file), str(log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert said == {models.resolve(gguf_file)}
    assert log.read_text() == "once\n"


def test_what_a_killed_process_left_is_replaced(
    model_cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cacheblend_rag.models import gguf

    def killed(file: Path, folder: Path, name: str) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", killed)
        with pytest.raises(KeyboardInterrupt):
            models.resolve(gguf_file)
    assert not [path for path in model_cache.iterdir() if path.is_dir()]
    (folder,) = [path for path in model_cache.iterdir() if path.name.endswith(".lock")]
    left = folder.with_suffix(".partial")
    left.mkdir()
    (left / "config.json").write_text("{")
    assert json.loads(Path(models.resolve(gguf_file), "config.json").read_text())
    assert not left.exists()


def refused(name: object) -> str:
    with pytest.raises(ModelLoadError) as failure:
        TransformersEngine(str(name))
    line = str(failure.value)
    assert "\n" not in line
    return line


HUB_FORMAT = "give the model's folder in hub format instead"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "nonsense"}, "nonsense is not supported"),
        ({"tokenizer": False}, "the GGUF file holds no tokenizer"),
        ({"parts": 3}, "one of 3 parts of a split GGUF: join them first"),
        ({"settings": {"rope.scaling.type": "yarn"}}, "setting llama.rope.scaling.type='yarn'"),
        ({"settings": {"attention.scale": 0.5}}, "setting llama.attention.scale=0.5"),
        ({"rope_factors": [3.0] * 8}, "rotary frequencies are scaled in an unknown way"),
        ({"leave_out": "blk.1.ffn_up.weight"}, "does not read all weights"),
        ({"pre": "default"}, "an unknown pre-tokenizer ('default')"),
        ({"roles": {"bos": 264}}, "its bos token is number 264, but it lists 264 tokens"),
        ({"roles": {"eos": 4000}}, "its eos token is number 4000, but it lists 264 tokens"),
        ({"roles": {"padding": 2**32 - 1}}, "its padding token is number 4294967295"),
        ({"roles": {"unknown": 264}}, "its unknown token is number 264"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_in_a_line(
    model_cache: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    file = write_gguf(tmp_path / "refused.gguf", tiny_llama(), **options)
    line = refused(file)
    assert line.startswith(f"model={str(file)!r}: ")
    assert reason in line
    assert HUB_FORMAT in line or "join them" in line
    assert not [path for path in model_cache.iterdir() if path.is_dir()]


OTHER_MODELS = {
    "tokenizer.json": Tokenizer(WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]")).to_str(),
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "x"}',
    "chat_template.jinja": "another model's",
    "adapter_config.json": '{"base_model_name_or_path": "/nowhere"}',
}


def test_files_of_other_models_beside_it_are_not_read(
    model_cache: Path, gguf_file: Path, tmp_path: Path
) -> None:
    alone = models.resolve(gguf_file)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    file = write_gguf(downloads / "other.gguf", tiny_llama(seed=5))
    for beside, text in OTHER_MODELS.items():
        (downloads / beside).write_text(text)
    folder = models.resolve(file)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert Path(folder, name).read_bytes() == Path(alone, name).read_bytes()
    torch.testing.assert_close(logits(load(file)), logits(tiny_llama(seed=5)), rtol=0, atol=1e-5)


def test_files_and_folders_that_hold_no_single_model_are_told_apart(
    model_cache: Path, gguf_file: Path, tmp_path: Path
) -> None:
    assert refused(tmp_path / "none.gguf").endswith("there is no such file")
    text = tmp_path / "text.gguf"
    text.write_text("no weights")
    assert "is not a GGUF file" in refused(text)
    assert "holds no config.json; give a .gguf file by its own name" in refused(tmp_path)


def test_a_full_disk_is_told_by_the_folder_on_it(
    model_cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("cacheblend_rag.models.gguf.save_weights", full)
    line = refused(gguf_file)
    assert f"{model_cache} cannot be used: [Errno 28] No space left on device: free space" in line
    assert not [path for path in model_cache.iterdir() if path.is_dir()]


def test_a_conversion_that_fails_is_told_in_a_line(
    model_cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by what a Rust library throws where it fails its own assertion."""
    with pytest.raises(BaseException, match="out of range") as panic:
        BPE({"a": 0, "b": 1}, [("a", "b")])
    for failure in (SafetensorError("I/O error"), KeyError("rope_theta"), panic.value):
        monkeypatch.setattr("cacheblend_rag.models.gguf.save_weights", Mock(side_effect=failure))
        line = refused(gguf_file)
        assert line.startswith(f"model={str(gguf_file)!r}: ")
        assert f"its conversion failed ({type(failure).__name__}: " in line
        assert not [path for path in model_cache.iterdir() if path.is_dir()]
