"""The steps of ``bench gpu``, in their order, with the seconds that each may take."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_SECONDS = 500.0
"""Limit of all steps together: nine minutes, less the command's own start on a new machine."""
TOY_FACTOR = 4.0
"""On tiny shapes a step may take so many times longer: CPUs that run tests are slow and busy."""


@dataclass(frozen=True)
class Step:
    """One step.

    measure: the generator that yields its rows, as ``module:function``. seconds: its limit, the
    start of its process included. needs_cuda, needs_checkout: it is skipped without a CUDA device,
    or where the package is not part of a checkout. has_model: whether it runs a model.
    """

    name: str
    about: str
    measure: str
    seconds: float
    needs_cuda: bool = False
    needs_checkout: bool = False
    has_model: bool = False


def _step(name: str, about: str, seconds: float, **traits: bool) -> Step:
    return Step(name, about, f"cacheblend_rag.bench.gpu.{name}:measure", seconds, **traits)


def _model_step(name: str, about: str, seconds: float, *, cuda: bool = False) -> Step:
    return _step(name, about, seconds, has_model=True, needs_cuda=cuda)


STEPS = (
    _step("facts", "the card, its driver, versions, what they support", 25),
    _step("link", "copies between host and device memory", 30, needs_cuda=True),
    _step("products", "a layer's largest matrix product, by rows", 20),
    _step("attention", "one layer's attention, by rows and keys, in new shapes", 75),
    _model_step("laying", "stored chunks into the buffer, keys re-rotated, per layer", 30),
    _model_step("layer", "one driven layer on chosen rows", 40),
    _model_step("ttft", "time to first token of blends and ordinary prefill, chunks in memory", 95),
    _model_step("tiers", "time to first token by where chunk KV is", 45),
    _model_step("memory", "peak memory of a request beyond weights and store", 40),
    _model_step("graphs", "driven layers on few rows, without and with CUDA graphs", 50, cuda=True),
    _step(
        "checks", "the project's tests that need a CUDA device", 50,
        needs_cuda=True, needs_checkout=True,
    ),
)  # fmt: skip
STEP_NAMES = tuple(step.name for step in STEPS)
