"""Findings on blended requests that gain little time to first token."""

from __future__ import annotations

from cacheblend_rag.observe.doctor.evidence import Evidence, Trial, waited
from cacheblend_rag.observe.doctor.finding import Figure, Finding, FindingCode, SettingChange

WAITS = 0.5
"""Share of a request's time to first token that it waits for one tier, for that tier to be slow."""
WORTH = 0.3
"""The wait is at least this share of full prefill, so that it costs much of the gain."""
CONFIRMED = 0.25
"""Reading the chunks once more takes at least this share of the wait: it was no hiccup."""
MUCH_WORK = 0.5
"""Share of full prefill's work that leaves too little gain."""
LATE = 0.5
"""Depth from which on a check layer is late: all rows run up to it."""


def machine_busy(evidence: Evidence) -> Finding | None:
    """Other processes take the CPUs."""
    load = evidence.load
    if load is None or not load.is_busy:
        return None
    return Finding(
        FindingCode.MACHINE_BUSY,
        "Other processes take the CPUs, so times say little; checks of times are left out.",
        {
            "others_cpu_share": round(load.other, 3),
            "own_cpu_share": round(load.own, 3),
            "steal_cpu_share": round(load.steal, 3),
            "idle_cpu_share": round(load.idle, 3),
        },
        SettingChange(
            "CPUs of this process",
            f"shared: others use {load.other + load.steal:.0%}",
            "CPUs of its own (a quieter machine, a cpuset)",
            "prefill, and blending with it, no longer wait for a CPU",
        ),
    )


def tier_slow(evidence: Evidence) -> Finding | None:
    """A request waits longer for stored KV than it computes."""
    first = evidence.first
    if first is None or not first.blended or not evidence.is_quiet or not evidence.full_seconds:
        return None
    waits = waited(first)
    tier = max(waits, key=lambda name: waits[name], default="")
    seconds, total = waits.get(tier, 0.0), first.seconds.time_to_first_token
    if seconds < WAITS * total or seconds < WORTH * evidence.full_seconds:
        return None
    slow = evidence.tiers.get(tier)
    if slow is not None and (slow.read_seconds or 0.0) < CONFIRMED * seconds:
        return None  # a hiccup, or memory, which is not read again
    figures: dict[str, Figure] = {
        f"waited_seconds_{name}": round(waits[name], 4) for name in sorted(waits)
    }
    if slow is not None:
        figures["bytes"] = slow.read_bytes
        figures["read_again_seconds"] = round(slow.read_seconds or 0.0, 4)
    figures |= {
        "first_token_seconds": round(total, 4),
        "full_seconds": round(evidence.full_seconds, 4),
    }
    return Finding(
        FindingCode.TIER_SLOW,
        f"A request waits for the tier {tier!r} longer than it computes.",
        figures,
        SettingChange(
            "store.tiers",
            f"{tier!r}: {seconds:.2f} s for this prompt's chunks",
            "a faster place for these chunks: host memory (host_bytes) or a local SSD",
            f"up to {seconds:.2f} s less to the first token",
        ),
    )


def check_layer_late(evidence: Evidence) -> Finding | None:
    """All rows run up to a late check layer, whatever the ratio is."""
    now, other = evidence.in_force, evidence.earlier
    if now is None or now.report.trace is None:
        return None
    rows, choices = now.report.trace.rows, now.report.trace.selections
    layer = next((one.layer for one in choices if one.layer is not None), None)
    if layer is None or not rows or layer < LATE * len(rows):
        return None
    if now.report.compute_share < MUCH_WORK:
        return None
    figures: dict[str, Figure] = {
        "check_layer": layer,
        "layers": len(rows),
        "rows_before_check_share": round(sum(rows[: layer + 1]) / max(1, sum(rows)), 3),
        "compute_share": round(now.report.compute_share, 3),
        "early_layers_seconds": round(now.report.seconds.early_layers, 4),
    }
    after = ""
    if other is not None:
        figures["compute_share_at_proposed"] = round(other.report.compute_share, 3)
        after = f", compute_share {other.report.compute_share:.2f}"
    return Finding(
        FindingCode.CHECK_LAYER_LATE,
        f"The check layer is {layer} of {len(rows)} layers: every token is computed up to it.",
        figures,
        SettingChange(
            "check_layers",
            str(tuple(evidence.config.check_layers)),
            "(1,)",
            f"rows are chosen after the first layer{after}",
        ),
    )


def ratio_too_high(evidence: Evidence) -> Finding | None:
    """So many tokens are recomputed that little is saved."""
    now = evidence.in_force
    if now is None or now.ratio < MUCH_WORK or now.report.compute_share < MUCH_WORK:
        return None
    return Finding(
        FindingCode.RATIO_TOO_HIGH,
        "So many tokens are recomputed that little of full prefill's work is saved.",
        {
            "recompute_ratio": now.ratio,
            "compute_share": round(now.report.compute_share, 3),
            **_of_less(evidence.less),
        },
        SettingChange(
            "recompute_ratio",
            f"{now.ratio:g}",
            "a lower one" if evidence.less is None else f"{evidence.less.ratio:g}",
            _effect(now, evidence.less),
        ),
    )


def _of_less(less: Trial | None) -> dict[str, Figure]:
    if less is None:
        return {}
    figures: dict[str, Figure] = {"compute_share_at_proposed": round(less.report.compute_share, 3)}
    if less.loss is not None:
        figures["loss_nats_at_proposed"] = round(less.loss, 4)
    return figures


def _effect(now: Trial, less: Trial | None) -> str:
    if less is None:
        return "less work"
    work = f"{now.report.compute_share:.0%} of full prefill's work become "
    work += f"{less.report.compute_share:.0%}"
    return work if less.loss is None else f"{work}, at a loss of {less.loss:.3f} nats per token"


CHECKS = (machine_busy, tier_slow, check_layer_late, ratio_too_high)
