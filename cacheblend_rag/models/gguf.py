"""Converts GGUF files into folders in hub format, by transformers' own loader.

The engines load safetensors; a GGUF file is converted once, into the folder of converted models.
transformers ignores what it does not know, and the model would then silently compute something
else. So a file is refused unless all its weights and settings are in the model. Floating-point
weights keep their precision. Quantized ones are stored in bfloat16: that rounds each by less than
one part in 256 and, as with published checkpoints, makes them the same for engines of any
precision.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.memory import give_back_unused
from cacheblend_rag.models import converted
from cacheblend_rag.models.gguf_header import CannotConvertError, GgufHeader, read_header
from cacheblend_rag.progress import begin_task

_alone = Lock()
"""Held by a conversion, which has transformers' own progress bars replaced."""

MAGIC = b"GGUF"
SUFFIX = ".gguf"
PANIC = "PanicException"
"""A failed assertion of a Rust library, which cannot be imported and is no Exception."""
NOT_ALL = "transformers does not read all weights of this GGUF"
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one for each pair of components."""
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OF_NO_EFFECT = {
    *("block_count", "embedding_length", "feed_forward_length", "expert_feed_forward_length"),
    *("expert_shared_feed_forward_length", "vocab_size", "context_length", "tensor_data_layout"),
    "rope.scaling.finetuned",
}
"""Settings that compute nothing, or whose wrong value would not fit the weights."""
IN_CONFIG = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "rope.freq_base": ("rope_theta",),
    "rope.dimension_count": ("rope_width",),
}
"""Names in Hugging Face configs of GGUF settings that are called otherwise there."""
NEUTRAL = {"rope.scaling.type": "none", "attention.causal": True}


def has_suffix(path: Path) -> bool:
    """Whether a path ends in ``.gguf``."""
    return path.suffix.lower() == SUFFIX


def is_gguf(path: Path) -> bool:
    """Whether a file begins with GGUF's magic bytes."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def converted_folder(file: Path, name: str) -> Path:
    """Return the folder that a GGUF file was converted into; converts it the first time.

    name: as the user gave it, for messages. Equal content is converted once, whatever its path.
    Raises ModelLoadError when it cannot be converted.
    """
    state, path = file.stat(), file.resolve()
    told = f"{path} {state.st_size} {state.st_mtime_ns} {converted.FORMAT}"
    seen = converted.models_folder() / f".{hashlib.sha256(os.fsencode(told)).hexdigest()}"
    if seen.is_dir():  # a link: the file need not be read again
        return seen.parent / seen.readlink()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = converted.models_folder() / f"gguf-{digest[:32]}-{converted.FORMAT}"
    record = converted.Record(path.stem if has_suffix(path) else path.name, str(path))
    converted.make_once(folder, record, lambda target: convert(file, target, name))
    with suppress(OSError):
        seen.symlink_to(folder.name)
    return folder


def convert(file: Path, folder: Path, name: str) -> None:
    """Write a GGUF file's model into a folder in hub format.

    Raises ModelLoadError, naming the reason, when it cannot be converted, OSError when the folder
    cannot be written.
    """
    from cacheblend_rag.models.gguf_tokenizer import save_tokenizer

    try:
        header = read_header(file)
        with tempfile.TemporaryDirectory(prefix="cacheblend-") as alone:
            # transformers also reads what lies beside a file, which may be another model's
            linked = Path(alone) / f"model{SUFFIX}"
            linked.symlink_to(file.resolve())
            with _progress_shown(f"converting tensors of {file.name}", len(header.tensors)):
                end_tokens = save_tokenizer(linked, header, folder)
                save_weights(linked, header, folder, end_tokens)
    except CannotConvertError as error:
        raise ModelLoadError(f"model={name!r}: {error}") from error
    except BaseException as error:  # of transformers and Rust libraries, of many kinds
        is_systems = isinstance(error, OSError) and error.errno is not None
        if is_systems or not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        why = f"its conversion failed ({type(error).__name__}: {first_line(error)})"
        raise ModelLoadError(f"model={name!r}: {CannotConvertError(why)}") from error
    finally:
        give_back_unused()


@contextmanager
def _progress_shown(title: str, tensors: int) -> Iterator[None]:
    """Show how many tensors transformers has read, in place of its own bars."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as bars

    def counted(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        for item in items:
            yield item
            task.advance()

    with _alone:
        own, had_bars = reader.tqdm, bars.is_progress_bar_enabled()
        reader.tqdm = counted
        bars.disable_progress_bar()
        task = begin_task(title, tensors)
        try:
            yield
        finally:
            task.end()
            reader.tqdm = own
            if had_bars:
                bars.enable_progress_bar()


def save_weights(file: Path, header: GgufHeader, folder: Path, end_tokens: Sequence[int]) -> None:
    """Write a GGUF file's config and weights into a folder.

    end_tokens: end an answer, for the generation config. Raises CannotConvertError when
    transformers would ignore weights or settings.
    """
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    _check_weights(config, header)
    _put_rope_factors(config.get_text_config(), file, header)
    _check_settings(config.get_text_config(), header)
    model = _read(file, header, config)
    model.generation_config = GenerationConfig(
        bos_token_id=header.tokenizer("bos_token_id"),
        eos_token_id=end_tokens[0] if len(end_tokens) == 1 else list(end_tokens) or None,
        pad_token_id=header.tokenizer("padding_token_id"),
    )
    model.save_pretrained(folder)


def _read(file: Path, header: GgufHeader, config: Any) -> Any:
    """Load the model, in the precision of its weights; quantized ones in bfloat16."""
    import torch
    import transformers

    kinds = {one.kind for one in header.tensors.values()}
    dtype = torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16
    options: dict[str, Any] = {"dtype": torch.float32 if kinds == {"F32"} else dtype}
    if (quantization := getattr(transformers, "GgufConfig", None)) is not None:
        options["quantization_config"] = quantization(dequantize=True)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, output_loading_info=True, **options
    )
    for name in (*found["missing_keys"], *found["mismatched_keys"]):
        raise CannotConvertError(f"{NOT_ALL} (no {name})")
    return model


def _check_weights(config: Any, header: GgufHeader) -> None:
    """Raise CannotConvertError unless a config describes as many weights as the file holds."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(config)
    held = sum(parameter.numel() for parameter in described.parameters())
    expected = sum(
        math.prod(one.shape) for name, one in header.tensors.items() if name != ROPE_FACTORS
    )
    if held != expected:
        raise CannotConvertError(f"{NOT_ALL} ({held:,} of {expected:,} values)")


def _put_rope_factors(config: Any, file: Path, header: GgufHeader) -> None:
    """Set Llama 3's scaling of rotary frequencies, which GGUF files store as a tensor.

    Raises CannotConvertError when the factors do not follow Llama 3's formula.
    """
    import numpy as np
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if (held := header.tensors.get(ROPE_FACTORS)) is None:
        return
    factors = torch.from_numpy(np.fromfile(file, "<f4", math.prod(held.shape), offset=held.place))
    config.rope_parameters = config.rope_parameters | LLAMA3 | {"factor": factors.max().item()}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = float(config.rope_parameters["rope_theta"])
    plain = theta ** -(torch.arange(len(factors)) / len(factors))
    if len(scaled) != len(plain) or not torch.allclose(plain / factors, scaled, rtol=1e-4, atol=0):
        raise CannotConvertError("its rotary frequencies are scaled in an unknown way")


def _check_settings(config: Any, header: GgufHeader) -> None:
    """Raise CannotConvertError unless a config has all of a GGUF file's settings."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = getattr(config, "rope_parameters", None) or {}
    ropes = [
        {**rope, "rope_width": width * rope.get("partial_rotary_factor", 1)}
        for rope in [one for one in plain.values() if isinstance(one, dict)] or [plain]
    ]  # one for each kind of layer if they differ
    for key, value in header.settings.items():
        names = IN_CONFIG.get(key, (key.rpartition(".")[2],))
        held = [getattr(config, name, None) for name in names]
        held += [rope.get(name) for rope in ropes for name in names]
        if key in OF_NO_EFFECT or NEUTRAL.get(key) == value:
            continue
        if not any(_same(one, value) for one in held):
            raise CannotConvertError(
                f"transformers ignores the setting {header.architecture}.{key}={value!r}"
            )


def _same(held: Any, value: Any) -> bool:
    if isinstance(held, int | float) and isinstance(value, int | float):
        return math.isclose(held, value, rel_tol=1e-6)
    return bool(held == value)
