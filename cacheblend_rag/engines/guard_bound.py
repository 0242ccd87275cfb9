"""Confidence bounds for a mean that may drift, valid however often they are read.

Each bound is a bet: a capital of 1 is bet, sample by sample, on a mean above (or below) m. If the
mean is not there, the capital is a supermartingale, so it ever exceeds 1/error with a probability
of at most ``error`` (Ville's inequality). Sizes of bets: aGRAPA.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (JRSS B,
2024). Here new bettors begin all the time, with shares of the capital that sum to 1, so that many
good samples do not delay the detection of later bad ones; those of old samples are dropped.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BETTORS = 16
"""Most bettors at once; another one begins after each sixteenth of the window."""
BOLDNESS = 0.9
"""Largest share of its capital that a bettor can lose with one sample."""
ASSUMED_SPREAD = 0.2
"""Standard deviation that a bettor assumes before its first sample."""


class DriftingMean:
    """Bounds for the mean of samples from ``low`` to ``high``.

    error: of each bound. window: samples after which they are forgotten. told: means for which
    ``is_above`` and ``is_below`` answer. grid: into how many parts the range is divided; ``bounds``
    are between them. shape: of a sample, if several means are followed side by side; a number by
    default.
    """

    def __init__(
        self,
        *,
        error: float,
        window: int,
        told: tuple[float, ...],
        low: float,
        high: float,
        grid: int = 1,
        shape: tuple[int, ...] = (),
    ) -> None:
        between = np.linspace(low, high, grid + 1)[1:-1]
        self._means: Floats = np.unique(np.concatenate([between, told]))
        self._low, self._high = low, high
        self._needed, self._stride = -math.log(error), max(1, window // BETTORS)
        self.count, self._begun = 0, 0
        # Of each bettor: the logarithm of its share; its samples, their sum, their spread; the
        # logarithms of its capital, bet on each mean from above and from below.
        self._shares: Floats = np.empty(0)
        self._sums: Floats = np.empty((3, 0, *shape))
        self._capital: Floats = np.empty((2, 0, *shape, self._means.size))
        self._most: Floats = np.full((2, *shape, self._means.size), -np.inf)

    def observe(self, sample: float | Floats) -> None:
        """Take a sample into account."""
        if self.count % self._stride == 0:
            self._begin_bettor()
        self.count += 1
        self._capital += self._gains(sample)
        shares = self._shares.reshape(-1, *[1] * (self._most.ndim - 1))
        together = np.logaddexp.reduce(self._capital + shares, axis=1)
        self._most = np.maximum(self._most, together)
        seen, total, spread = self._sums
        off = sample - self._centre()
        self._sums = np.stack([seen + 1, total + sample, spread + off**2])

    def is_above(self, mean: float) -> NDArray[np.bool_]:
        """Whether the mean has surely been above ``mean``, one of those told."""
        return self._most[0, ..., self._index(mean)] >= self._needed

    def is_below(self, mean: float) -> NDArray[np.bool_]:
        """Whether the mean has surely been below ``mean``, one of those told."""
        return self._most[1, ..., self._index(mean)] >= self._needed

    @property
    def bounds(self) -> tuple[float, float]:
        """The mean of numbers has surely been above the first bound, and below the second."""
        above, below = (self._means[side >= self._needed] for side in self._most)
        return float(above.max(initial=self._low)), float(below.min(initial=self._high))

    @property
    def mean(self) -> float:
        """The mean of the samples, numbers, that are not forgotten; 0 without any."""
        seen, total, _ = self._sums
        return float(total[0] / seen[0]) if self.count else 0.0

    def _index(self, mean: float) -> int:
        return int(np.searchsorted(self._means, mean))

    def _begin_bettor(self) -> None:
        self._begun += 1
        share = -math.log(self._begun * (self._begun + 1))  # 1/2 + 1/6 + 1/12 + ... = 1
        self._shares = np.append(self._shares, share)[-BETTORS:]
        self._sums, self._capital = (
            np.concatenate(
                [kept, np.zeros_like(kept, shape=(kept.shape[0], 1, *kept.shape[2:]))], 1
            )[:, -BETTORS:]
            for kept in (self._sums, self._capital)
        )

    def _centre(self) -> Floats:
        """Return each bettor's guess of the mean before the next sample."""
        seen, total, _ = self._sums
        centre: Floats = total / np.maximum(seen, 1.0)
        return centre

    def _gains(self, sample: float | Floats) -> Floats:
        """Return the logarithms of the factors by which the capitals change."""
        seen, _, spread = self._sums
        gap = self._centre()[..., None] - self._means
        variance = ((spread + ASSUMED_SPREAD**2) / (seen + 1))[..., None]
        bet = np.where(seen[..., None] > 0, gap / (variance + gap**2), 0.0)
        above = np.clip(bet, 0.0, BOLDNESS / (self._means - self._low))
        below = np.clip(-bet, 0.0, BOLDNESS / (self._high - self._means))
        off = np.asarray(sample)[..., None] - self._means
        return np.stack([np.log1p(above * off), np.log1p(-below * off)])


def samples_to_notice(
    mean: float, limit: float, spread: float, *, error: float, window: int, seen: int
) -> int:
    """Return within how many samples a mean above ``limit`` is nearly always noticed.

    mean, spread: of the samples from some moment on. seen: samples before it. A bettor that begins
    right after it gains so much with each sample, twice as long for the luck of the draw, until
    it has made up for its small share.
    """
    gap, stride = mean - limit, max(1, window // BETTORS)
    gain = gap**2 / (2 * (spread**2 + gap**2))
    begun = seen // stride + 2
    needed = -math.log(error) + math.log(begun * (begun + 1))
    return stride + math.ceil(2 * needed / gain)
