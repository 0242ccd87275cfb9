"""Which engine is opened, what is told about it, and errors of one line."""

from __future__ import annotations

import json
from gc import collect
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from cacheblend_rag import (
    BlendConfig,
    CacheBlendError,
    ConfigError,
    ModelLoadError,
)
from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from toy import TOY

from langchain_cacheblend import CacheBlendCompressor, CacheBlendTransformer, ChatCacheBlend
from langchain_cacheblend.options import EngineOptions
from tests.models import toy_engine


def cache_key(llm: ChatCacheBlend, **options: Any) -> str:
    """The key of an answer with these options in LangChain's cache; nothing is loaded for it."""
    return llm._get_llm_string(**options)


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="instruction, store: fixed by the engine"):
        ChatCacheBlend(engine=toy_engine(), instruction="Answer.", kv_path="kv")
    with pytest.raises(ConfigError, match="document_ky"):
        CacheBlendTransformer(engine=toy_engine(), document_ky="id")


def test_options_by_names_of_other_libraries() -> None:
    made = CacheBlendTransformer(model_name="toy", base_url="http://localhost:1")
    assert (made.model, made.engine_source) == ("toy", "http://localhost:1")
    llm = ChatCacheBlend(model=TOY, max_new_tokens=5, stop_sequences="x")
    assert (llm.max_tokens, llm.stop) == (5, ["x"])
    assert cache_key(llm, max_new_tokens=7) == cache_key(llm, max_tokens=7)
    assert cache_key(llm, stop_sequences=["a"]) == cache_key(llm, stop=["a"])
    assert llm._get_ls_params(max_new_tokens=7, temperature=0.5) == {
        "ls_provider": "cacheblend",
        "ls_model_type": "chat",
        "ls_model_name": llm.model_name,
        "ls_temperature": 0.5,
        "ls_max_tokens": 7,
        "ls_stop": ["x"],
    }


@pytest.mark.parametrize("kind", [ChatCacheBlend, CacheBlendTransformer, CacheBlendCompressor])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"naamespace": "s3cret"}, " (did you mean 'namespace'?)"),
        ({"model_name": "s3cret"}, "model and model_name name one option"),
        (
            {"blend_config": {"selectr": "s3cret"}},
            "unknown setting 'selectr' of a request (did you mean 'selector'?)",
        ),
        ({"model": ""}, "model='': name a model, or give engine= an engine or a URL"),
    ],
)
def test_wrong_options_are_refused_in_a_line_before_anything_is_loaded(
    kind: type[EngineOptions], options: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(**{"model": "no-such-model", **options})
    assert told in one_line(raised.value)
    assert "s3cret" not in str(raised.value)


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    llm = ChatCacheBlend(model=tmp_path / "none", instruction=ChatPromptTemplate.from_template("x"))
    assert (llm.is_open, llm.model_name) == (False, "none")
    with pytest.raises(ModelLoadError) as raised:
        llm.invoke("hello")
    assert "there is no such folder" in one_line(raised.value)


def test_call_options_are_checked() -> None:
    llm = ChatCacheBlend(engine=toy_engine(), max_tokens=1)
    for options, named in (
        ({"tool": []}, "unknown call option 'tool' (did you mean 'tools'?)"),
        ({"tools": "search"}, "tools is a str: give a list"),
        ({"tool_choice": "any"}, "tool_choice='required' needs tools"),
        ({"response_format": 3}, "response_format=3 must be"),
        ({"top_logprobs": 21}, "logprobs=21 must be less than or equal to 20"),
        ({"temprature": 1}, "unknown call option 'temprature' (did you mean 'temperature'?)"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_tokens and max_new_tokens name one"),
        ({"recompute_ratio": 2}, "recompute_ratio=2"),
        ({"hints": [Document("text")]}, "hints hold a Document: give Chunks or document ids"),
    ):
        with pytest.raises(CacheBlendError) as raised:
            llm.invoke("hello", **options)
        assert named in one_line(raised.value)


def test_no_secret_and_no_engine_is_told(tmp_path: Path) -> None:
    llm = ChatCacheBlend(model=str(tmp_path), api_key="s3cret", engine="http://127.0.0.1:9")
    told = [
        repr(llm),
        str(llm),
        dumps(llm),
        json.dumps(dumpd(llm)),
        llm.model_dump_json(),
        repr(llm._identifying_params),
        cache_key(llm),
        repr(llm._get_ls_params()),
    ]
    assert not any("s3cret" in text or str(tmp_path.parent) in text for text in told)
    given = ChatCacheBlend(engine=toy_engine())
    assert not any("Engine object" in text for text in (repr(given), given.model_dump_json()))


def test_the_cache_key_changes_with_what_an_answer_depends_on() -> None:
    def key(**options: object) -> str:
        return cache_key(ChatCacheBlend(**{"model": "a", **options}))

    keys = [
        key(),
        key(model="b"),
        key(model="folder/a"),
        key(instruction="Answer."),
        key(namespace="other"),
        key(temperature=0.5),
        key(max_tokens=7),
        key(seed=1),
        key(stop=["x"]),
        key(dtype="bfloat16"),
        key(blend_config=BlendConfig(recompute_ratio=0.5)),
        cache_key(ChatCacheBlend(model="a"), recompute_ratio=0.5),
        cache_key(ChatCacheBlend(model="a"), hints=["report"]),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


@pytest.mark.parametrize("is_given", [False, True], ids=["opened", "given"])
def test_equal_settings_share_an_engine_while_a_component_has_them(is_given: bool) -> None:
    opened = {"model": TOY, "namespace": "shared", "blend_config": {"min_tokens": 0}}
    settings = {"engine": toy_engine()} if is_given else opened
    llm = ChatCacheBlend(**settings, max_tokens=2)  # opens nothing before the others are gone
    text = "The river is quiet, and nobody is on the bridge. " * 5
    CacheBlendTransformer(**settings).transform_documents([Document(text)])
    configurable = llm.configurable_fields(max_tokens=ConfigurableField(id="tokens"))
    for again in (
        configurable.with_config(configurable={"tokens": 1}),
        configurable,
        ChatCacheBlend(**settings, max_tokens=3),
        llm.bind(max_tokens=1),
        llm.model_copy(),
    ):
        assert again.invoke(f"{text}\nHello").usage_metadata["input_token_details"]["cache_read"]
    engine = ref(llm.engine)
    del llm, again, configurable, settings
    collect()
    assert engine() is None
