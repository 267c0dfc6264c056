"""What a server counts and measures, in the form that Prometheus reads.

Labels have values from short lists that the server itself makes; nothing that a client wrote ever becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

#: Bounds in seconds: of what a person waits for, of what the machine does in between, and of whole sessions.
WAITS: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LONG: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

# The time at which each count began, which nobody asks for, would be as many numbers again.
disable_created_metrics()  # type: ignore[no-untyped-call]

HTTP_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Description(NamedTuple):
    """One line of the reference. ``name`` is what to ask Prometheus for; a histogram has ``_bucket``, ``_sum``,
    ``_count`` behind it."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str


class Metrics:
    """The metrics of one server; what is under way is read when it is asked for, by the functions of the gauges."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.descriptions: list[Description] = []
        #: What is done before anything is read: some counts are brought up to date only then.
        self.before_reading: list[Callable[[], None]] = []
        self._sessions()
        self._requests()
        self._input()
        self._output()
        self._server()

    def _sessions(self) -> None:
        self.sessions_active = self._gauge("sessions_active", "Live sessions, as /health counts them.")
        self.sessions_limit = self._gauge("sessions_limit", "Live sessions that there may be.")
        self.sessions_away = self._gauge("sessions_away", "Live sessions whose client is gone and may come back.")
        self.sessions_opened = self._counter("sessions_opened", "Sessions that were opened.", "origin")
        self.session_seconds = self._histogram(
            "session_duration_seconds", "Length of sessions that have ended.", LONG, "origin"
        )
        self.resumes = self._counter(
            "resumes",
            "Clients that came back: `resumed`; `resync` where the session could not tell all that was missed; "
            "`refused` where there was no such session, or the token was wrong.",
            "outcome",
        )
        self.refused = self._counter(
            "refused", "Sessions, and requests of open sessions, that were refused a place.", "what", "code"
        )

    def _requests(self) -> None:
        self.requests_active = self._gauge(
            "requests_active", "Requests by where they are: `input`, `queue` or `engine` (see the stages).", "stage"
        )
        self.requests = self._counter(
            "requests",
            "Requests that have ended. `code` is that of the error, empty where there was none.",
            *("origin", "finish_reason", "code"),
        )
        self.first_output_seconds = self._histogram(
            "time_to_first_output_seconds",
            "From the end of the input to the first output of any kind; 0 where output came before that end.",
            WAITS,
            "origin",
        )
        self.first_audio_seconds = self._histogram(
            "time_to_first_audio_seconds", "The same to the first audio.", WAITS, "origin"
        )
        self.request_seconds = self._histogram(
            "request_duration_seconds", "From the first chunk of a request to its final.", LONG, "origin"
        )
        self.stage_seconds = self._histogram(
            "stage_duration_seconds",
            "Parts of a request: `input` until work on it started, `queue` until the engine got it, `engine` until the "
            "engine was done with it. They overlap with the input's end, since input streams.",
            WAITS,
            "stage",
        )
        self.interrupt_seconds = self._histogram(
            "interrupt_seconds",
            "From a cancel, or the speech or request that interrupts an answer, until the engine has let go of it.",
            SHORT,
            "by",
        )

    def _input(self) -> None:
        self.input_chunks = self._counter("input_chunks", "Chunks that came in order or were put in order.")
        self.input_bytes = self._counter("input_bytes", "Payload of those chunks, decoded.")
        self.input_audio_seconds = self._counter("input_audio_seconds", "Audio in requests that have ended.")
        self.duplicates = self._counter("input_duplicates", "Chunks that had come before, and were dropped.")
        self.reordered = self._counter("input_reordered", "Chunks that came ahead of their turn.")
        self.reorder_wait_seconds = self._counter(
            "input_reorder_wait_seconds", "How long those waited for what was missing before them, together."
        )
        self.gap_seconds = self._counter("input_gap_seconds", "How long streams stood because a chunk was missing.")
        self.speech_turns = self._counter("speech_turns", "Turns that turn detection heard begin.")
        self.listening_seconds = self._counter("listening_seconds", "Time that threads spent listening for turns.")
        self.listening_pieces = self._counter("listening_pieces", "Pieces of audio that they looked at.")

    def _output(self) -> None:
        self.output_audio_seconds = self._counter("output_audio_seconds", "Audio that was sent to clients.")
        self.player_lead_seconds = self._histogram(
            "player_lead_seconds",
            "Least audio that a client had left to play while its answer was being made, by its own `played_ms`.",
            WAITS,
        )
        self.player_underruns = self._counter(
            "player_underruns", "Times that a client that tells `played_ms` had played everything before more came."
        )
        self.player_underrun_seconds = self._counter(
            "player_underrun_seconds", "Silence that those heard in the middle of answers."
        )
        self.stall_seconds = self._counter(
            "output_stall_seconds", "How long answers waited because their clients did not read."
        )
        self.stalls = self._counter("output_stalls", "Times that they did.")

    def _server(self) -> None:
        self.held_bytes = self._gauge("held_bytes", "Input, decoded media and output held for all sessions together.")
        self.held_bytes_limit = self._gauge("held_bytes_limit", "Bytes that may be held.")
        self.queue_bytes = self._gauge(
            "queue_bytes",
            "What all sessions hold: `input` that no engine has taken over, `outbox` for clients to read, `journal` to "
            "be sent again to who comes back, `history` for speech of earlier turns.",
            "hop",
        )
        self.queue_items = self._gauge(
            "queue_items", "`reorder`: chunks behind a gap; `outbox`: messages for clients to read.", "hop"
        )
        self.engine_up = self._gauge("engine_up", "1 where the engine works, else 0.", "engine")
        self.engine_active = self._gauge("engine_active_requests", "Requests that the engine works on.", "engine")
        self.draining = self._gauge("draining", "1 once the server ends, else 0.")
        self.loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds", "How late the event loop woke up, ten times a second.", SHORT
        )
        self.http_connections = self._gauge("http_connections", "Open HTTP connections.")
        self.websocket_connections = self._gauge("websocket_connections", "Open WebSocket connections.")
        self.http_requests = self._counter(
            "http_requests",
            "HTTP requests by the template of their path (`unmatched`: none) and status (101: a WebSocket; 0: the "
            "client left before any).",
            *("method", "route", "status"),
        )
        self.http_request_seconds = self._histogram(
            "http_request_duration_seconds", "From the head of a request to the end of its answer.", LONG, "route"
        )
        self.grpc_calls = self._counter("grpc_calls", "Calls of salience.v1.", "method", "status")
        self.grpc_call_seconds = self._histogram("grpc_call_duration_seconds", "Length of those calls.", LONG, "method")
        self.info = self._gauge("info", "Always 1: which version runs.", "version", "engine")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        self._describe(f"{name}_total", MetricKind.COUNTER, labels, meaning)
        return Counter(f"omni_ws_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        self._describe(name, MetricKind.GAUGE, labels, meaning)
        return Gauge(f"omni_ws_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self._describe(name, MetricKind.HISTOGRAM, labels, meaning)
        return Histogram(f"omni_ws_{name}", meaning, labels, registry=self.registry, buckets=buckets)

    def _describe(self, name: str, kind: MetricKind, labels: tuple[str, ...], meaning: str) -> None:
        self.descriptions.append(Description(f"omni_ws_{name}", kind, labels, meaning))

    def render(self, accept: str) -> Callable[[], tuple[bytes, str]]:
        """Read everything now, and return what makes the text of it, and its media type, which any thread may call.

        It holds what other libraries in this process count, too: vLLM, and the process itself.
        """
        for prepare in self.before_reading:
            prepare()
        encode, media_type = choose_encoder(accept)
        families = [*self.registry.collect(), *REGISTRY.collect()]
        return lambda: (encode(_Read(families)), media_type)


class _Read(Collector):
    """What was read is what is written."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
