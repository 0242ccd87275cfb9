"""Samples tokens and decodes them into text, which is pushed as it becomes final."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheblend_rag.engines.answer import Delta, FinishReason, RawLogprob, Request, with_texts
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.transformers.guiding import Guide
from cacheblend_rag.engines.transformers.ordinary_prefill import (
    DecodeStep,
    OrdinaryPrefill,
    raw_logprob,
)
from cacheblend_rag.engines.transformers.prefill import Prefilled
from cacheblend_rag.prefill.stopwatch import Stopwatch


class Sampler:
    """Samples tokens one by one according to the sampling settings.

    Processors and their order are those of transformers' own ``generate``. Before them, tokens that
    the answer's form rules out get no share, and the others' log-probabilities are read; and behind
    the repetition penalty come the other two, as in vLLM.

    prompt_tokens: how many tokens were not sampled. guide: of the answer's form, if it has one.
    """

    def __init__(
        self,
        sampling: ResolvedSampling,
        device: torch.device,
        prompt_tokens: int = 0,
        guide: Guide | None = None,
    ) -> None:
        self.greedy = sampling.temperature == 0
        self._told, self._guide = sampling.logprobs, guide
        self.processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            self.processors.append(penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.processors.append(AnswerPenalties(sampling, prompt_tokens))
        if not self.greedy:
            self.processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self.processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self.processors.append(TopPLogitsWarper(float(sampling.top_p)))
            if sampling.min_p:
                self.processors.append(MinPLogitsWarper(float(sampling.min_p)))
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def draw(self, logits: Tensor, token_ids: list[int]) -> tuple[int, RawLogprob | None]:
        """Return the next token, and its log-probability if that is asked for.

        logits: (1, vocabulary). token_ids: everything before it.
        """
        if self._guide is not None:
            logits = self._guide.allowed(logits)
        token = self._drawn(logits, token_ids)
        if self._guide is not None:
            self._guide.take(token)
        if self._told is None:
            return token, None
        return token, raw_logprob(logits[0], token, self._told)

    def _drawn(self, logits: Tensor, token_ids: list[int]) -> int:
        if self.processors:
            seen = torch.tensor([token_ids], device=logits.device)
            logits = self.processors(seen, logits.clone())
        if self.greedy:
            return int(logits.argmax(-1))
        shares = logits.softmax(-1)
        return int(torch.multinomial(shares, 1, generator=self.generator))


class AnswerPenalties(LogitsProcessor):  # type: ignore[misc] # has no types
    """Lowers the logits of tokens that the answer already has; see SamplingParams.

    prompt_tokens: how many tokens before the answer do not count.
    """

    def __init__(self, sampling: ResolvedSampling, prompt_tokens: int) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return new logits, (1, vocabulary); input_ids: (1, tokens), the prompt and the answer."""
        said = torch.bincount(input_ids[0, self._prompt_tokens :], minlength=scores.shape[-1])
        counts = said[: scores.shape[-1]].to(scores.dtype)
        return scores - self._frequency * counts - self._presence * (counts > 0)


class TextStream:
    """Decodes tokens into text piece by piece, holding back text that may still change.

    Held back are incomplete characters and any ending that may grow into a stop string.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._sent = 0
        self._begun = [0] * len(stop)  # where the text may begin to be each stop string
        self._known = 0  # tokens whose text is final
        self._window = 0  # where decoding restarts, so that joins between tokens come out right

    def feed(self, token_id: int) -> str:
        """Add a token; return the text that became final."""
        self.token_ids.append(token_id)
        self._decode(final=False)
        return self._take(self._final())

    def finish(self) -> str:
        """Return the rest; no token follows."""
        if not self.stopped:
            self._decode(final=True)
        return self._take(len(self.text))

    def _decode(self, *, final: bool) -> None:
        before = self._plain(self.token_ids[self._window : self._known])
        after = self._plain(self.token_ids[self._window :])
        if after.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return
        start = len(self.text)
        self.text += after[len(before) :]
        self._window, self._known = self._known, len(self.token_ids)
        self._cut(start)

    def _cut(self, start: int) -> None:
        """Cut the text at the first stop string that ends in what was just added."""
        longest = max((len(s) for s in self.stop), default=0)
        found = [self.text.find(s, max(0, start - longest + 1)) for s in self.stop]
        first = min((at for at in found if at >= 0), default=-1)
        if first >= 0:
            self.text, self.stopped = self.text[:first], True

    def _final(self) -> int:
        """Index of the longest ending that is the beginning of a stop string.

        More text never makes a beginning of what is none, so each place is looked at once.
        """
        end = len(self.text)
        if self.stopped:
            return end
        for index, stop in enumerate(self.stop):
            at = self._begun[index]
            while at < end and not stop.startswith(self.text[at : at + len(stop)]):
                found = self.text.find(stop[0], at + 1)
                at = found if found >= 0 else end
            self._begun[index] = at
        return min(self._begun, default=end)

    def _take(self, end: int) -> str:
        piece, self._sent = self.text[self._sent : end], max(self._sent, end)
        return piece

    def _plain(self, token_ids: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends an answer, as generation config and tokenizer name them."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, list | tuple) else [named]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))


class Decoding:
    """An answer that grows token by token behind a prefilled prompt.

    ends: tokens that end an answer. guide: of the answer's form, if it has one.
    """

    def __init__(
        self,
        request: Request,
        prefilled: Prefilled,
        *,
        tokenizer: Any,
        ends: Collection[int],
        guide: Guide | None,
    ) -> None:
        self._request, self._prefilled, self._guide = request, prefilled, guide
        self._ends = ends if guide is not None or not request.sampling.ignore_eos else ()
        self._token_ids = list(request.prepared.token_ids)
        device, report = prefilled.logits.device, prefilled.report
        self._watch, self._phase = Stopwatch(device, report.seconds, report.starts), "first_token"
        self._sampler = Sampler(request.sampling, device, len(self._token_ids), guide)
        self._text, self._piece = TextStream(tokenizer, request.sampling.stop), ""
        self._raw, self._told, self._told_ids = list[RawLogprob](), 0, 0

    def steps(
        self, ordinary: OrdinaryPrefill, push: Callable[[Delta], None], tell: Callable[..., Delta]
    ) -> Generator[DecodeStep, None, Delta]:
        """Decode; returns the last piece, with the whole answer.

        Yields each decode step that has to be run before the next token.

        Args:
            ordinary: how the model is run, as tested when the prompt was prefilled.
            push: takes text as soon as no later token can change it.
            tell: makes the last delta of the answer's text, tokens, finish reason, prefill report
                and log-probabilities.
        """
        reason = self._add(self._prefilled.logits)
        while reason is None:
            if self._piece:
                push(self._final(self._piece))
                self._piece = ""
            yield (step := DecodeStep(ordinary, self._prefilled.cache, self._token_ids))
            reason = "cancelled" if self._request.cancel.is_set() else self._add(step.take())
        report, text = self._prefilled.report, self._text
        rest = self._final(self._piece + text.finish())
        asked, of_prompt = self._request.sampling, self._prefilled.prompt_logprobs
        told = {
            "logprobs": self._raw if asked.logprobs is not None else None,
            "prompt_logprobs": of_prompt if asked.prompt_logprobs is not None else None,
        }
        texts = {name: raw and with_texts(raw, text.tokenizer) for name, raw in told.items()}
        last = tell(text.text, text.token_ids, reason, report, **texts)
        return replace(rest, generation=last.generation)

    def _add(self, logits: Tensor) -> FinishReason | None:
        """Draw a token; returns why the answer ends with it, if it does."""
        token, logprob = self._sampler.draw(logits, self._token_ids)
        self._token_ids.append(token)
        self._prefilled.answer.append(token)
        self._watch.lap(self._phase)
        self._phase = "decode"
        if token in self._ends:
            return "stop"
        self._piece += self._text.feed(token)
        if logprob is not None:
            self._raw.append(logprob)
        if self._text.stopped or (self._guide is not None and self._guide.is_over):
            return "stop"
        if self._request.cancel.is_set():
            return "cancelled"
        is_full = len(self._prefilled.answer) >= self._request.sampling.max_tokens
        return "length" if is_full else None

    def _final(self, text: str) -> Delta:
        """Return text that no later token can change, with what was not told yet."""
        new, self._told = self._raw[self._told :], len(self._raw)
        ids = self._text.token_ids[self._told_ids :]
        self._told_ids += len(ids)
        logprobs = with_texts(new, self._text.tokenizer)
        return Delta(text, logprobs=logprobs, token_ids=tuple(ids))
