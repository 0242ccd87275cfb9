"""What training prompts look like, from short and easy ones to those of the evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.toy import EVALUATION_SHAPE, CorpusShape


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        shape: what prompts look like.
        settings: the corpus's settings with their shares of the batches.
        until: share of the training tokens after which the next stage begins in any case.
        separate: share of batches in which documents do not see each other.
        other_frames: share of batches in another wording than the default one.
        begun: share of batches that ask by beginning a statement, which is easier.
        batch_tokens: tokens a batch, padding included.
    """

    shape: CorpusShape
    settings: tuple[tuple[str, float], ...] = (("adjacent", 1.0),)
    until: float = 1.0
    separate: float = 0.25
    other_frames: float = 0.2
    begun: float = 0.0
    batch_tokens: int = 8_000


def _small(**changes: Any) -> CorpusShape:
    base = CorpusShape(
        documents=(3, 3),
        chunks=(2, 2),
        total_chunks=(0, 99),
        direct_facts=(1, 2),
        referring_facts=(1, 2),
        context_tokens=(0, 0),
        mixed=0.1,
    )
    return replace(base, **changes)


def _short(names: int, *, begun: float, **changes: Any) -> Stage:
    shape = _small(names=(names, names), **changes)
    return Stage(shape, separate=0.0, other_frames=0.0, begun=begun, batch_tokens=4_000)


CURRICULUM = (
    _short(4, begun=1.0, explicit=0.4, wordings=1),
    _short(8, begun=0.4, explicit=0.2, wordings=1),
    _short(8, begun=0.2, explicit=0.1),
    _short(8, begun=0.1, explicit=0.1, context_tokens=(120, 200)),
    Stage(
        _small(
            names=(16, 16), explicit=0.1, documents=(3, 4), referring_facts=(2, 3),
            chunks=(2, 3), context_tokens=(200, 320),
        ),
        batch_tokens=6_000,
    ),
    Stage(
        _small(
            names=(32, 48), explicit=0.05, documents=(4, 5), referring_facts=(2, 4),
            chunks=(2, 3), context_tokens=(350, 600),
        )
    ),
    Stage(replace(EVALUATION_SHAPE, mixed=0.15)),
)  # fmt: skip

# What a trained model goes on with, in shorter prompts first. `linked` has the text of `adjacent`.
# In `fragments` and `shuffled` the prompt does not decide the answer; a model that never sees them
# would learn from `unanswerable` to say so instead of guessing among the candidates.
_DECIDED = (("adjacent", 0.27), ("revised", 0.24), ("unanswerable", 0.27), ("turns", 0.12))
EXTENSION = (
    Stage(
        replace(
            EVALUATION_SHAPE, documents=(4, 5), total_chunks=(8, 12), context_tokens=(350, 600)
        ),
        settings=_DECIDED,
        until=0.4,
        batch_tokens=5_000,
    ),
    Stage(
        replace(EVALUATION_SHAPE, mixed=0.1),
        settings=(*_DECIDED, ("fragments", 0.05), ("shuffled", 0.05)),
        batch_tokens=5_000,
    ),
)
