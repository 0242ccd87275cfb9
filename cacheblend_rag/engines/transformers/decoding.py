"""Samples tokens and decodes them into text, which is yielded as it becomes final."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

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
from cacheblend_rag.engines.lifetime import working
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.transformers.guiding import Guide
from cacheblend_rag.engines.transformers.prefill import Prefilled
from cacheblend_rag.prefill.stopwatch import Stopwatch

NextLogits: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Returns the logits, (1, vocabulary) float32, after a prompt and the tokens decoded so far."""


class Sampler:
    """Samples tokens one by one according to the sampling settings.

    Processors and their order are those of transformers' own ``generate``. Before them, tokens that
    the answer's form rules out get no share, and the others' log-probabilities are read; and behind
    the repetition penalty come the other two, as in vLLM.

    prompt_tokens: how many tokens were not sampled. guide: of the answer's form, if it has one.
    logprob: of the token that was drawn last, if log-probabilities are asked for.
    """

    def __init__(
        self,
        sampling: ResolvedSampling,
        device: torch.device,
        prompt_tokens: int = 0,
        guide: Guide | None = None,
    ) -> None:
        self.greedy = sampling.temperature == 0
        self.logprob: RawLogprob | None = None
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

    def draw(self, logits: Tensor, token_ids: list[int]) -> int:
        """Return the next token; logits: (1, vocabulary), token_ids: everything before it."""
        if self._guide is not None:
            logits = self._guide.allowed(logits)
        token = self._drawn(logits, token_ids)
        if self._told is not None:
            self.logprob = raw_logprob(logits[0], token, self._told)
        if self._guide is not None:
            self._guide.take(token)
        return token

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


def raw_logprob(logits: Tensor, token: int, most: int) -> RawLogprob:
    """Return the log-probability of a token and of the ``most`` likely ones, by logits."""
    shares = logits.float().log_softmax(-1)
    top = shares.topk(most)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return RawLogprob(token, float(shares[token]), tuple(pairs))


def sampled_tokens(
    request: Request, prefilled: Prefilled, next_logits: NextLogits, guide: Guide | None = None
) -> Iterator[tuple[int, RawLogprob | None]]:
    """Sample at most max_tokens tokens, one per decode step, until the guide is over."""
    watch = Stopwatch(prefilled.logits.device, prefilled.report.seconds, prefilled.report.starts)
    token_ids = list(request.prepared.token_ids)
    sampler = Sampler(request.sampling, prefilled.logits.device, len(token_ids), guide)
    for index in range(request.sampling.max_tokens):
        logits = next_logits(token_ids) if index else prefilled.logits
        with working():
            token_ids.append(sampler.draw(logits, token_ids))
            del logits  # here, since PyTorch releases the interpreter lock while it frees a tensor
        prefilled.answer.append(token_ids[-1])
        watch.lap("decode" if index else "first_token")
        yield token_ids[-1], sampler.logprob
        watch.skip()
        if guide is not None and guide.is_over:
            return


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


def decoded(
    request: Request,
    prefilled: Prefilled,
    next_logits: NextLogits,
    *,
    tokenizer: Any,
    ends: Collection[int],
    guide: Guide | None,
    tell: Callable[..., Delta],
) -> Iterator[Delta]:
    """Yield text as soon as no later token can change it, and the whole answer at last.

    ends: tokens that end an answer. guide: of the answer's form. tell: makes the last delta of the
    answer's text, tokens, finish reason, prefill report and log-probabilities.
    """
    text = TextStream(tokenizer, request.sampling.stop)
    ends = ends if guide is not None or not request.sampling.ignore_eos else ()
    reason: FinishReason = "length"
    piece, told = "", 0
    raw: list[RawLogprob] = []
    for token, logprob in sampled_tokens(request, prefilled, next_logits, guide):
        if token in ends:
            reason = "stop"
            break
        with working():
            piece = text.feed(token)
            if logprob is not None:
                raw.append(logprob)
        if text.stopped or (guide is not None and guide.is_over):
            reason = "stop"
            break
        if request.cancel.is_set():
            reason = "cancelled"
            break
        if piece:
            yield Delta(piece, logprobs=with_texts(raw[told:], tokenizer))
            piece, told = "", len(raw)
    rest = piece + text.finish()
    logprobs = None if request.sampling.logprobs is None else with_texts(raw, tokenizer)
    last = tell(text.text, text.token_ids, reason, prefilled.report, logprobs=logprobs)
    yield Delta(rest, last.generation, logprobs=(logprobs or ())[told:])
