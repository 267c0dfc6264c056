"""Renders a report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_FIGURES: Final = ("count", "avg", "p50", "p95", "max")
#: Requests that are listed, the longest first.
MOST_TIMELINES: Final = 20


def as_text(report: Mapping[str, Any], *, timelines: int = MOST_TIMELINES) -> str:
    """Renders the report."""
    return "\n".join(_lines(report, timelines)) + "\n"


def _lines(report: Mapping[str, Any], timelines: int) -> Iterator[str]:
    yield from _head(report)
    yield ""
    yield "Latencies (ms; rtf: a ratio)"
    yield from _table(report["rollups"], ("measure", *_FIGURES))
    yield ""
    yield "Stages (ms)"
    yield from _table(report["stage_breakdown"], ("stage", "interval", *_in_ms(_FIGURES), "total_ms"))
    yield ""
    yield "Hops (ms)"
    yield from _table(report["hop_breakdown"], ("src", "dst", "kind", *_in_ms(_FIGURES)))
    yield ""
    requests = sorted(report["requests"], key=lambda request: -request["end_to_end_ms"])
    shown = f", the {timelines} longest" if len(requests) > timelines else ""
    yield f"Requests (ms){shown}"
    columns = ("request_id", "origin", "task", "finish_reason", "end_to_end_ms", "ttft_ms", "ttfa_ms", "unaccounted_ms")
    yield from _table(requests[:timelines], columns)


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    share = report["accounted_share"]
    yield (
        f"run {report['run_id'] or '(unnamed)'}: {report['request_count']} requests, "
        f"{report['end_to_end_ms']:g} ms in total" + (f", {share:.1%} accounted for" if share is not None else "")
    )
    if report["partial_requests"]:
        yield f"{report['partial_requests']} requests without a recorded start or end are left out of the figures"
    if report["broken_lines"]:
        first = report["broken_lines"][0]
        yield f"{len(report['broken_lines'])} invalid lines, the first at {first}"
    if report["other_runs"]:
        others = ", ".join(f"{name or '(unnamed)'} ({count} events)" for name, count in report["other_runs"].items())
        yield f"other runs (select with --run): {others}"


def _in_ms(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name if name == "count" else f"{name}_ms" for name in names)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    if not rows:
        yield "  (none)"
        return
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    titles = [column.removesuffix("_ms") for column in columns]
    widths = [max(len(title), *(len(row[at]) for row in cells)) for at, title in enumerate(titles)]
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    for row in (titles, *cells):
        line = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        )
        yield ("  " + "  ".join(line)).rstrip()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
