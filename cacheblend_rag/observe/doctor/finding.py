"""A finding: what is wrong with a request, what was measured, and the one setting to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

Symptom = Literal["quality", "memory", "time to first token"]
Figure = float | int | str


class FindingCode(StrEnum):
    """The codes of findings, the most serious first; new ones may be added."""

    MODEL_FAILS_VERIFY = "model_fails_verify"
    CANNOT_BE_BLENDED = "cannot_be_blended"
    NO_ROOM = "no_room"
    QUESTION_REGISTERED = "question_registered"
    OTHER_INSTRUCTION = "other_instruction"
    RATIO_TOO_LOW = "ratio_too_low"
    PREDICTIONS_DIFFER = "predictions_differ"
    GUARD_STOPPED = "guard_stopped"
    TIER_FAILS = "tier_fails"
    DAMAGED = "damaged"
    OTHER_MODEL = "other_model"
    WHITE_SPACE_DIFFERS = "white_space_differs"
    TEXT_DIFFERS = "text_differs"
    NOT_STORED = "not_stored"
    NO_KNOWN_CHUNK = "no_known_chunk"
    PROMPT_TOO_SHORT = "prompt_too_short"
    MACHINE_BUSY = "machine_busy"
    TIER_SLOW = "tier_slow"
    CHECK_LAYER_LATE = "check_layer_late"
    RATIO_TOO_HIGH = "ratio_too_high"
    PREFILL_SOONER = "prefill_sooner"


SYMPTOMS: Mapping[FindingCode, Symptom] = {
    FindingCode.MODEL_FAILS_VERIFY: "quality",
    FindingCode.NO_ROOM: "memory",
    FindingCode.QUESTION_REGISTERED: "quality",
    FindingCode.OTHER_INSTRUCTION: "quality",
    FindingCode.RATIO_TOO_LOW: "quality",
    FindingCode.PREDICTIONS_DIFFER: "quality",
    FindingCode.GUARD_STOPPED: "quality",
}
"""What a user notices, if it is not the time to first token."""
SEVERITY: Mapping[FindingCode, int] = {code: rank for rank, code in enumerate(FindingCode)}


@dataclass(frozen=True)
class SettingChange:
    """The setting to change.

    Args:
        setting: its name, of a field of BlendConfig, EngineConfig or StoreConfig where it is one.
        present: its value now.
        proposed: the value to try.
        effect: what to expect of it.
    """

    setting: str
    present: str
    proposed: str
    effect: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a request.

    Args:
        code: stable name.
        sentence: what is wrong.
        evidence: what was measured, by name; the unit is part of the name.
        change: the one setting to change.
        is_fault: False if nothing is broken, so that the exit code of the command stays 0.
    """

    code: FindingCode
    sentence: str
    evidence: Mapping[str, Figure]
    change: SettingChange
    is_fault: bool = True

    @property
    def symptom(self) -> Symptom:
        """What a user notices: worse answers, no memory, or no gain in time."""
        return SYMPTOMS.get(self.code, "time to first token")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "code": self.code.value, "symptom": self.symptom}


def quoted(text: str, most: int = 60) -> str:
    """Return the beginning of a text as a Python string, in one line."""
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")
