"""What a server tells Prometheus, by the names and labels that a query would use."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from support.live_server import LiveServer
from support.raw_http import RawResponse, call

from omni_ws.metrics import rendered


class Scrape:
    """Samples of one moment. What was never counted is 0."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._samples.get((f"omni_ws_{name}", frozenset(labels.items())), 0)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for found, labels in self._samples if found == f"omni_ws_{name}"]


async def metrics_answer(server: LiveServer, *headers: str) -> RawResponse:
    return await call(server.port, "GET", "/metrics", None, *headers)


async def scrape(server: LiveServer) -> Scrape:
    answer = await metrics_answer(server)
    assert answer.status == 200, answer
    return Scrape(answer.body.decode())


def read(server: LiveServer) -> Scrape:
    """The same without asking over HTTP, which needs threads: for a clock that jumps."""
    text, _ = rendered(server.app.sessions.metrics.families(), "")()
    return Scrape(text.decode())
