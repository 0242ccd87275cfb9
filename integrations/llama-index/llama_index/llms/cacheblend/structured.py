"""Objects of pydantic classes as answers, by decoding that allows nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model

from cacheblend_rag import ConfigError

_dispatcher = get_dispatcher(__name__)
Response = ChatResponse | CompletionResponse
Arguments = dict[str, Any]


def schema_text(output_cls: type[BaseModel]) -> str:
    """Return what the end of a prompt says of the object that is wanted."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    return f"Answer with one JSON object that follows this JSON schema:\n{schema}"


class StructuredPredictor(FunctionCallingLLM):
    """An LLM whose structured predictions are constrained by the schema of the class.

    The schema also stands at the end of the prompt, for its descriptions. ``pydantic_program_mode``
    is for programs of LlamaIndex's own.
    """

    @_dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Arguments | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an object of a pydantic class.

        Raises:
            ConfigError: when ``max_tokens`` end the answer before its JSON is whole.
            ValidationError: when the class refuses the values, by a validator of its own, say.
        """
        _announce(output_cls, prompt, prompt_args)
        chat, asked = self._asked_object(output_cls, prompt, llm_kwargs, prompt_args)
        return _announced(_read(self.chat(**asked) if chat else self.complete(**asked), output_cls))

    @_dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Arguments | None = None,
        **prompt_args: Any,
    ) -> Model:
        _announce(output_cls, prompt, prompt_args)
        chat, asked = self._asked_object(output_cls, prompt, llm_kwargs, prompt_args)
        response = await (self.achat(**asked) if chat else self.acomplete(**asked))
        return _announced(_read(response, output_cls))

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Arguments | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Yield what is known of the object, the whole one last."""
        chat, asked = self._asked_object(output_cls, prompt, llm_kwargs, prompt_args)
        return _objects(
            self.stream_chat(**asked) if chat else self.stream_complete(**asked), output_cls
        )

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Arguments | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        chat, asked = self._asked_object(output_cls, prompt, llm_kwargs, prompt_args)
        steps = await (self.astream_chat(**asked) if chat else self.astream_complete(**asked))
        return _aobjects(steps, output_cls)

    def _asked_object(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: Arguments | None,
        values: Arguments,
    ) -> tuple[bool, Arguments]:
        """Return whether the object is asked for by chat, and the arguments of the call."""
        # A dict of plain values: observers serialize the arguments of a call.
        held = {"structured_outputs": {"json": output_cls.model_json_schema()}}
        given, told = {**(llm_kwargs or {}), **held}, schema_text(output_cls)
        if not self.metadata.is_chat_model:
            text = f"{self._get_prompt(prompt, **values)}\n\n{told}\n\n"
            return False, {"prompt": text, "formatted": True, **given}
        messages = self._get_messages(prompt, **values)
        if messages and messages[-1].role is MessageRole.USER:
            *messages, last = messages
            blocks = [*last.blocks, TextBlock(text=f"\n{told}")]
            asked = last.model_copy(update={"blocks": blocks})
        else:
            asked = ChatMessage(role=MessageRole.USER, content=told)
        return True, {"messages": [*messages, asked], **given}


def _read(response: Response, output_cls: type[Model]) -> Model:
    text = response.text if isinstance(response, CompletionResponse) else response.message.content
    try:
        return output_cls.model_validate_json(text or "")
    except ValidationError:
        if (response.raw or {}).get("finish_reason") != "length":
            raise
    raise ConfigError(
        f"max_tokens ended the JSON of {output_cls.__name__} after {len(text or '')} characters: "
        "give a higher max_tokens"
    )


def _objects(steps: Iterator[Response], output_cls: type[Model]) -> Generator[Any, None, None]:
    so_far: Any = None
    for step in steps:
        so_far = _partial(step, output_cls, so_far)
        yield so_far


async def _aobjects(
    steps: AsyncIterator[Response], output_cls: type[Model]
) -> AsyncGenerator[Any, None]:
    so_far: Any = None
    async for step in steps:
        so_far = _partial(step, output_cls, so_far)
        yield so_far


def _partial(step: Response, output_cls: type[Model], so_far: Any) -> Any:
    if step.raw is not None:  # the last step
        return _read(step, output_cls)
    known = None if so_far is None else [so_far]
    return process_streaming_objects(step, output_cls, cur_objects=known)


def _announce(output_cls: type[Any], prompt: Any, values: Arguments) -> None:
    _dispatcher.event(
        LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=values)
    )


def _announced(result: Model) -> Model:
    _dispatcher.event(LLMStructuredPredictEndEvent(output=cast("BaseModel", result)))
    return result
