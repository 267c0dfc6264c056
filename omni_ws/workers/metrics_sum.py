"""The metrics of a server, from those of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

#: A metric as workers send it: name, documentation, type, unit, and its samples with name, labels and value.
Family: TypeAlias = tuple[str, str, str, str, list[tuple[str, dict[str, str], float]]]

#: Gauges that are no amounts. All others add up, as counters and histograms do.
_COMBINED: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    **dict.fromkeys(("omni_ws_engine_up", "omni_ws_part_up", "omni_ws_draining", "process_start_time_seconds"), min),
    **dict.fromkeys(("omni_ws_sessions_limit", "omni_ws_info", "python_info", "process_max_fds"), max),
}
#: Types that only ever grow, and which therefore must not shrink when a worker ends.
_GROWING: Final = frozenset({"counter", "histogram", "summary"})


def as_families(metrics: Iterable[Metric]) -> list[Family]:
    """Metrics in the form in which workers send them."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            metric.unit,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in metrics
    ]


def as_metrics(families: Iterable[Family]) -> list[Metric]:
    """The reverse of ``as_families``."""
    metrics = []
    for name, documentation, kind, unit, samples in families:
        metric = Metric(name, documentation, kind, unit)
        metric.samples.extend(Sample(sample, labels, value) for sample, labels, value in samples)
        metrics.append(metric)
    return metrics


def growing(families: Iterable[Family]) -> list[Family]:
    """The metrics that outlive a worker: counters and histograms."""
    return [family for family in families if family[2] in _GROWING]


def summed(parts: Sequence[Sequence[Family]]) -> list[Family]:
    """The metrics of several workers together, in the order in which they first appear."""
    families: dict[str, Family] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
    for part in parts:
        for name, documentation, kind, unit, samples in part:
            families.setdefault(name, (name, documentation, kind, unit, []))
            for sample, labels, value in samples:
                values.setdefault((name, sample, tuple(labels.items())), []).append(value)
    for (name, sample, of_sample), found in values.items():
        combine: Any = _COMBINED.get(name, sum) if families[name][2] not in _GROWING else sum
        families[name][4].append((sample, dict(of_sample), combine(found)))
    return list(families.values())
