"""A check with its result, and the verdict on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
Measured = Mapping[str, float]

FORBIDS = ("blending", "positions", "exactness", "stored KV", "fidelity")
"""Checks whose failure means that the model should not be blended; others can be put right."""


@dataclass(frozen=True)
class Check:
    """One check of a model, with its result; its methods return it with another one.

    Args:
        name: short and unique.
        what: what it does.
        status: ``ok``, ``failed`` or ``skipped``.
        found: what was found, or why it was skipped.
        measured: figures by name; KL is in nats, shares are from 0 to 1.
        remedy: what to do about a failure.
    """

    name: str
    what: str
    status: Status = "skipped"
    found: str = ""
    measured: Measured = field(default_factory=dict)
    remedy: str = ""

    def ok(self, found: str, measured: Measured | None = None) -> Check:
        """Return the check as passed."""
        return replace(self, status="ok", found=found, measured=measured or {})

    def failed(self, found: str, remedy: str, measured: Measured | None = None) -> Check:
        """Return the check as failed."""
        return replace(self, status="failed", found=found, measured=measured or {}, remedy=remedy)

    def skipped(self, why: str) -> Check:
        """Return the check as not made."""
        return replace(self, found=why)


@dataclass(frozen=True)
class Verdict:
    """All checks of a model.

    Args:
        model: its public name.
        engine: the kind of engine that ran it.
        dtype: in what precision.
        device: where.
        checks: in the order in which they were made.
    """

    model: str
    engine: str
    dtype: str
    device: str
    checks: Sequence[Check]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def advice(self) -> str:
        """One line: whether to blend this model."""
        if self.passed:
            return "blend this model"
        names = ", ".join(check.name for check in self.failed)
        if any(check.name in FORBIDS for check in self.failed):
            return f"do not blend this model: it failed {names}"
        return f"put this right before you blend this model: {names}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "engine": self.engine,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "advice": self.advice,
            "checks": [asdict(check) for check in self.checks],
        }
