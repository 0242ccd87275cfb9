"""Makes a command whose options are the fields of a benchmark's plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.rag import checks

PlanT = TypeVar("PlanT")
Measure = Callable[[Any, Callable[[str], None]], dict[str, Any]]
"""Takes a plan and a callback for the label of each step; returns plain JSON values."""
Show = Callable[[dict[str, Any]], None]


def plan_command(
    plan: type[PlanT], run: Callable[[PlanT, bool], None], about: str
) -> Callable[..., None]:
    """Return a function for Typer: its options are the plan's fields, and ``--json``.

    Args:
        plan: a dataclass whose options are made by `bench.plan.option`; other fields keep their
            defaults.
        run: called with the plan and whether to print JSON.
        about: the command's help text.

    Raises:
        ConfigError: when called with values that the plan refuses.
    """
    hints = get_type_hints(plan)
    told = [one for one in fields(plan) if "help" in one.metadata]  # type: ignore[arg-type]

    def command(*, as_json: bool, **values: Any) -> None:
        checks.check_placement(None, values.get("dtype"))
        checks.check_blend(None, values.get("selector"))
        model = values.get("model")
        if isinstance(model, str) and model:
            quiet_libraries()
            checks.check_model(model)
        run(plan(**{one.name: _value(one, values[one.name]) for one in told}), as_json)

    parameters = [_parameter(one, hints[one.name]) for one in told]
    parameters.append(_keyword("as_json", False, options.JsonOption))
    command.__doc__ = about
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def measured(measure: Measure, show: Show, plan: Any, as_json: bool) -> None:
    """Run a benchmark and print its results as tables or JSON; name what was left out."""
    with output.stdout_reserved(as_json), output.side_console().status("starting") as status:
        found = measure(plan, status.update)
    for reason in found.get("left_out", ()):
        output.warn(f"left out: {reason}")
    (output.print_json if as_json else show)(found)


def facts(title: str) -> Show:
    """Return a function that prints results, single runs aside, as a table of two columns."""
    return lambda found: output.print_facts(
        title, {name: value for name, value in found.items() if name != "runs"}
    )


def _parameter(one: Field[Any], hint: Any) -> inspect.Parameter:
    meta, default = one.metadata, cast("Any", one.default)
    if default is MISSING:
        default = inspect.Parameter.empty
    flag = meta["flag"] or f"--{one.name.replace('_', '-')}"
    if meta["comma"]:
        hint, default = str, ",".join(map(str, default))
    elif get_origin(hint) is tuple:
        hint, default = list[get_args(hint)[0]], list(default)  # type: ignore[misc]
    elif get_origin(hint) is Literal:
        hint = str
    asked = typer.Option(flag, help=meta["help"], min=meta["least"])
    return _keyword(one.name, default, Annotated[hint, asked])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _value(one: Field[Any], value: Any) -> Any:
    if one.metadata["comma"]:
        return options.layers(value, f"--{one.name.replace('_', '-')}")
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else value
