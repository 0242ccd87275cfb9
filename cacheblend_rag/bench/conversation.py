"""Measures time to first token in each turn of a conversation, and how near the answers are.

Each turn has passages of its own, which stay in the prompt in their turn. The same prompts are
answered with everything that is kept (passages' chunk KV, and the KV of earlier turns), by prefix
caching alone, and by full prefill. Passages are made of the sentences of real ones, in random
order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plans import ConversationPlan
from cacheblend_rag.bench.workload import draw_passage, sample_sentences
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.prepare import TurnPrompt
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.comparing import divergence
from cacheblend_rag.prefill.conversation_kv import ConversationKV
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.instructed import SEPARATOR, InstructedChat
from cacheblend_rag.text.prompt import BlendPrompt

INSTRUCTION = "Answer each question from the passages above it. Be brief."
DOCUMENT = "bench"
CONFIG = BlendConfig(cost_model=False)
"""What is stored is reused, however long that takes."""
ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class ConversationRow:
    """One turn. Seconds are those to the first token.

    ours_seconds: with passages' and turns' KV. prefix_seconds: with prefix caching only. mean_kl:
    the mean, over the answer's tokens, of the divergence of its predictions from full prefill's of
    the same prompt, in nats. full_over_ours, prefix_over_ours: how many times faster it is.
    earlier_turns: in the prompt. passage_tokens, turn_tokens: whose stored KV was reused, as
    passages' and as turns'. prefix_tokens: that prefix caching reused.
    """

    turn: int
    full_seconds: float
    prefix_seconds: float
    ours_seconds: float
    mean_kl: float
    full_over_ours: float
    prefix_over_ours: float
    prompt_tokens: int
    earlier_turns: int
    passage_tokens: int
    turn_tokens: int
    prefix_tokens: int


def measure_conversation(
    plan: ConversationPlan, advance: Advance = lambda _: None
) -> dict[str, Any]:
    """Return ``turns``, a row for each turn, and the parameters.

    nothing_dropped: the rows of the first turns of the same conversation, as many as the context
    window holds, with no limit on the prompt below that.
    """
    advance(f"loading {plan.model}")
    with ExitStack() as stack:
        bench = _Bench(plan, stack, advance)
        rows = list(bench.rows(plan.prompt_tokens, drops=True))
        undropped = [] if plan.skip_undropped else list(bench.rows(bench.room, drops=False))
    return {
        "model": plan.model,
        "passages": plan.passages,
        "passage_tokens": plan.passage_tokens,
        "answer_tokens": plan.answer_tokens,
        "prompt_tokens": plan.prompt_tokens,
        "turns": [asdict(row) for row in rows],
        "nothing_dropped": [asdict(row) for row in undropped],
    }


@dataclass(frozen=True)
class _Told:
    """A turn: the user's message and its answer."""

    content: str
    answer: str = ""


class _Bench:
    """Two engines around one model: one with all that is kept, one with prefix caching alone.

    The latter is new for each table, since their prompts are partly the same.
    """

    def __init__(self, plan: ConversationPlan, stack: ExitStack, advance: Advance) -> None:
        self._plan, self._advance = plan, advance
        self._ours = TransformersEngine(
            plan.model,
            config=CONFIG,
            store=TieredKVStore.open(host_bytes=None),
            instruction=lambda tokenizer: InstructedChat(tokenizer, INSTRUCTION).lead_in,
        )
        stack.callback(self._ours.close)
        self._chat = InstructedChat(self._ours.tokenizer, INSTRUCTION)
        self._passages, self._questions = draw_turns(plan, self._ours)
        advance(f"precomputing {plan.turns * plan.passages} passages")
        self._ours.precompute([one for turn in self._passages for one in turn], progress=False)

    def _with_prefixes(self) -> TransformersEngine:
        """Return an engine with prefix caching alone, which has seen no prompt."""
        return TransformersEngine(
            self._ours.model,
            tokenizer=self._ours.tokenizer,
            config=CONFIG,
            store=TieredKVStore.open(host_bytes=self._plan.prefix_bytes),
        )

    @property
    def room(self) -> int:
        """Most tokens of a prompt within the context window."""
        return self._ours.context_window - self._plan.answer_tokens

    def rows(self, most_tokens: int, *, drops: bool) -> Iterator[ConversationRow]:
        """Yield a row a turn; ends early if a prompt does not fit and nothing may be dropped."""
        with closing(self._with_prefixes()) as self._prefix:
            yield from self._answered(most_tokens, drops=drops)

    def _answered(self, most_tokens: int, *, drops: bool) -> Iterator[ConversationRow]:
        kv, told = ConversationKV(most_turns=self._plan.turns), list[_Told]()
        for turn, question in enumerate(self._questions, start=1):
            what = "" if drops else ", nothing dropped"
            texts = [passage.text for passage in self._passages[turn - 1]]
            told.append(_Told(SEPARATOR.join([*texts, f"Question: {question}\nAnswer:"])))
            while self._tokens(told) > min(most_tokens, self.room):
                if not drops:
                    return
                if len(told) == 1:
                    raise CacheBlendError(
                        f"prompt_tokens={most_tokens} is too small for one turn: give more"
                    )
                del told[0]
            self._advance(f"turn {turn} of {self._plan.turns}{what}")
            row, answer = self._row(turn, kv, told, question)
            yield row
            told[-1] = replace(told[-1], answer=answer)
            self._note_answer(told)

    def _row(
        self, turn: int, kv: ConversationKV, told: Sequence[_Told], question: str
    ) -> tuple[ConversationRow, str]:
        """Answer one prompt in each way; returns the row, and the answer with all that is kept."""
        sampling = SamplingParams.greedy(self._plan.answer_tokens, ignore_eos=True)
        prompt = self._ours.prepare(TurnPrompt(kv, self._prompt(self._ours, told), question))
        found = self._ours.generate(prompt, sampling)
        plain = self._prompt(self._prefix, told)
        cached = self._prefix.generate(plain, ONE_TOKEN)
        full = self._prefix.score(plain, found.token_ids, full=True)
        near = self._ours.score(prompt, found.token_ids)
        starts = {part.start for part in prompt.segments}
        hits = [chunk for chunk in found.report.chunks if chunk.hit]
        full_seconds = full.report.seconds.time_to_first_token
        ours, prefix = _seconds(found), _seconds(cached)
        row = ConversationRow(
            turn=turn,
            full_seconds=full_seconds,
            prefix_seconds=prefix,
            ours_seconds=ours,
            mean_kl=divergence(full.log_probs.double(), near.log_probs.double()),
            full_over_ours=full_seconds / ours,
            prefix_over_ours=prefix / ours,
            prompt_tokens=found.prompt_tokens,
            earlier_turns=len(told) - 1,
            passage_tokens=sum(chunk.tokens for chunk in hits if chunk.start not in starts),
            turn_tokens=sum(chunk.tokens for chunk in hits if chunk.start in starts),
            prefix_tokens=cached.report.prefix_tokens,
        )
        return row, found.text.strip()

    def _note_answer(self, told: Sequence[_Told]) -> None:
        """Let prefix caching see the answer as if it were its own."""
        prompt = self._prompt(self._prefix, [*told, _Told("")])
        self._prefix.generate(prompt, ONE_TOKEN)
        self._prefix.prefixes.drain()
        self._ours.prefixes.drain()

    def _prompt(self, engine: TransformersEngine, told: Sequence[_Told]) -> BlendPrompt:
        *earlier, last = told
        chat = self._chat.render([(one.content, one.answer) for one in earlier], last.content)
        prompt = BlendPrompt.from_rendered(chat, engine.registry)
        return replace(prompt, is_rendered=self._chat.has_template)

    def _tokens(self, told: Sequence[_Told]) -> int:
        return len(self._prompt(self._prefix, told).encode(self._prefix.encoder).token_ids)


def draw_turns(
    plan: ConversationPlan, engine: TransformersEngine
) -> tuple[list[list[Chunk]], list[str]]:
    """Return each turn's passages, of about ``passage_tokens`` tokens each, and its question."""
    rng, sentences, tokens = random.Random(plan.seed), sample_sentences(), plan.passage_tokens
    passages = [
        [
            Chunk(draw_passage(rng, sentences, tokens, engine), DOCUMENT)
            for _ in range(plan.passages)
        ]
        for _ in range(plan.turns)
    ]
    questions = load_passages().questions
    return passages, [rng.choice(questions).question for _ in range(plan.turns)]


def _seconds(answer: Generation) -> float:
    return answer.report.seconds.time_to_first_token
