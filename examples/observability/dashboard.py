"""Writes dashboard.json, the Grafana dashboard beside this file, with Grafana's typed SDK.

Change a panel here, then run ``python examples/observability/dashboard.py``. It needs
``grafana-foundation-sdk``, which ``make setup`` installs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as models

WRITTEN = Path(__file__).with_name("dashboard.json")
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
INTERVAL = "[$__rate_interval]"
HEIGHT, PANELS_IN_A_ROW, WIDTH = 8, 2, 24


@dataclass(frozen=True)
class Panel:
    """A panel of lines over time.

    queries: by their legends. unit: of the values. stacked: whether the lines are parts of one sum.
    """

    title: str
    about: str
    queries: dict[str, str]
    unit: str = units.Short
    stacked: bool = False

    def build(self) -> timeseries.Panel:
        """Return the panel."""
        panel = (
            timeseries.Panel()
            .title(self.title)
            .description(self.about)
            .datasource(SOURCE)
            .unit(self.unit)
            .min(0)
            .height(HEIGHT)
            .span(WIDTH // PANELS_IN_A_ROW)
            .fill_opacity(30 if self.stacked else 0)
        )
        if self.stacked:
            stacking = common_builders.StackingConfig().group("A").mode(common.StackingMode.NORMAL)
            panel.stacking(stacking)
        for letter, (legend, query) in zip("ABCD", self.queries.items(), strict=False):
            asked = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter)
            panel.with_target(asked.range())
        return panel


def rate(name: str, by: str = "") -> str:
    """Return a counter's growth per second, of all engines, by the values of a label."""
    of = f" by ({by}) " if by else ""
    return f"sum{of}(rate({name}{{{MATCH}}}{INTERVAL}))"


def mean(histogram: str, by: str = "") -> str:
    """Return the mean of a histogram's latest values, by those of a label."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """Return a quantile of a histogram's latest values, by those of a label."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', labels)})"


def state(name: str) -> str:
    """Return the highest value of a gauge of applications, whose engines have the guard."""
    return f"max({APPLICATION}{name}{{{MATCH}}})"


MATCH = 'job=~"$job"'
SERVER, APPLICATION = "vllm:cacheblend_", "cacheblend_"
"""What the names of a vLLM server's metrics, and of an application's, begin with."""
OURS = "${source}"
TTFT = "time_to_first_token_seconds"

ROWS = {
    "What is reused": (
        Panel(
            "Chunks reused, and missed by reason",
            "Chunks of prompts per second. Reasons: docs/reports.md.",
            {
                "reused": rate(f"{OURS}chunk_hits_total"),
                "missed: {{reason}}": rate(f"{OURS}chunk_misses_total", "reason"),
            },
            stacked=True,
        ),
        Panel(
            "Chunks reused, by tier",
            "Where their KV was found, per second.",
            {"{{tier}}": rate(f"{OURS}chunk_hits_total", "tier")},
            stacked=True,
        ),
        Panel(
            "Requests blended, or answered by ordinary prefill",
            "Requests per second; the latter by reason.",
            {
                "blended": rate(f"{OURS}blended_requests_total"),
                "{{reason}}": rate(f"{OURS}fallbacks_total", "reason"),
            },
            stacked=True,
        ),
        Panel(
            "Tokens with stored KV",
            "Tokens of reused chunks per second: kept as stored, or computed afresh.",
            {
                "kept": rate(f"{OURS}reused_tokens_total"),
                "recomputed": rate(f"{OURS}recomputed_tokens_total"),
            },
            stacked=True,
        ),
    ),
    "Time to first token": (
        Panel(
            "Time to first token, median and 95 %",
            "Of all requests: as the server measures it, and as applications do.",
            {
                "server, median": quantile(0.5, f"vllm:{TTFT}"),
                "server, 95 %": quantile(0.95, f"vllm:{TTFT}"),
                "application, median": quantile(0.5, f"{APPLICATION}{TTFT}"),
                "application, 95 %": quantile(0.95, f"{APPLICATION}{TTFT}"),
            },
            units.Seconds,
        ),
        Panel(
            "Time to first token, by phase",
            "Mean seconds of each phase that took place. Phases: docs/reports.md.",
            {"{{phase}}": mean(f"{OURS}phase_seconds", "phase")},
            units.Seconds,
            stacked=True,
        ),
        Panel(
            "Phases, 95 %",
            "What the slowest requests wait for.",
            {"{{phase}}": quantile(0.95, f"{OURS}phase_seconds", "phase")},
            units.Seconds,
        ),
        Panel(
            "Waiting for stored KV, by tier",
            "Mean seconds of blended requests that waited for a tier.",
            {"{{tier}}": mean(f"{OURS}load_seconds", "tier")},
            units.Seconds,
        ),
    ),
    "Quality": (
        Panel(
            "Ratio in force",
            "Mean recompute ratio of blended requests, and the least one that the guard allows.",
            {
                "blended requests": mean(f"{OURS}recompute_ratio"),
                "least, by the guard": state("guard_ratio"),
            },
            units.PercentUnit,
        ),
        Panel(
            "Divergence from full prefill",
            "Of the guard's samples, in nats per token: mean of the latest, and of all since it "
            "was turned on, beside that of ordinary prefill.",
            {
                "latest": f"{rate(f'{OURS}guard_divergence_total')} / "
                f"{rate(f'{OURS}guard_samples_total')}",
                "all": state("guard_mean_divergence"),
                "ordinary prefill": state("guard_prefill_divergence"),
            },
        ),
        Panel(
            "The guard's samples",
            "Answers compared with full prefill, per second, and answers that wait for it.",
            {
                "compared": rate(f"{OURS}guard_samples_total"),
                "waiting": state("guard_waiting"),
            },
        ),
        Panel(
            "Stops",
            "Whether the guard has stopped blending (1), and how often it has raised the ratio. "
            "Chunks that are not reused since then have the reason guard_stopped.",
            {
                "stopped": state("guard_stopped"),
                "raised": state("guard_raised_total"),
            },
        ),
    ),
}


def dashboard() -> models.Dashboard:
    """Return the dashboard."""
    builder = (
        builders.Dashboard("cacheblend-rag")
        .uid("cacheblend-rag")
        .description("What is reused, how long the first token takes, how right answers are.")
        .tags(["cacheblend-rag", "vllm"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(
            builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(
            builders.CustomVariable("source")
            .label("Counted by")
            .values(f"vLLM servers : {SERVER}, applications : {APPLICATION}")
            .current(models.VariableOption(text="vLLM servers", value=SERVER))
        )
        .with_variable(
            builders.QueryVariable("job")
            .label("Job")
            .datasource(SOURCE)
            .query(f"label_values({OURS}blended_requests_total, job)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .current(models.VariableOption(text="All", value="$__all"))
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, panels in ROWS.items():
        builder.with_row(builders.Row(title))
        for panel in panels:
            builder.with_panel(panel.build())
    return builder.build()


def as_json() -> str:
    """Return the dashboard as Grafana imports it."""
    return json.dumps(dashboard(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(as_json(), encoding="utf-8")
    print(f"{WRITTEN} was written: import it in Grafana under Dashboards, New, Import")
