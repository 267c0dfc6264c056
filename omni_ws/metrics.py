"""The metrics of a server, in the formats of Prometheus.

Label values come from short, fixed lists: no value that a client sends becomes a label, so cardinality is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

#: Histogram buckets in seconds: for delays that a person notices, for internal delays, and for requests and sessions.
WAITS: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
SHORT: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LONG: Final = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
#: Buckets in tokens, as OpenTelemetry's conventions for generative AI advise.
TOKENS: Final = tuple(4**power for power in range(11))

# The _created series would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

HTTP_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Description(NamedTuple):
    """A row of docs/metrics.md.

    ``name`` is the name to query; a histogram also has the suffixes ``_bucket``, ``_sum`` and ``_count``. ``kind`` is
    Prometheus's name of the type.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Metrics:
    """The metrics of one server, in a registry of their own.

    Most gauges have no stored value: the owner of the value has set a function, which each scrape calls.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.descriptions: list[Description] = []
        #: The functions to call before each collection, to update counters that are kept elsewhere.
        self.before_reading: list[Callable[[], None]] = []
        self._sessions()
        self._requests()
        self._turns()
        self._input()
        self._output()
        self._store()
        self._server()

    def _sessions(self) -> None:
        self.sessions_active = self._gauge("sessions_active", "Live sessions, as in /health.")
        self.sessions_limit = self._gauge("sessions_limit", "Limit of live sessions.")
        self.sessions_away = self._gauge(
            "sessions_away", "Live sessions without a connection, which their client may resume."
        )
        self.summaries = self._counter(
            "summaries",
            "Summaries of long talks: `written`; `dropped`, as somebody spoke or the history changed, and begun again "
            "later; or `failed`.",
            "outcome",
        )
        self.sessions_opened = self._counter(
            "sessions_opened", "Sessions opened here, or taken from the store, each time.", "origin"
        )
        self.session_seconds = self._histogram(
            "session_duration_seconds", "Duration of ended sessions.", LONG, "origin"
        )
        self.resumes = self._counter(
            "resumes",
            "Attempts to resume: `resumed`; `taken_over` from the store, as another server had the session; `resync` "
            "if the journal no longer had all missed outputs; `refused` if the session did not exist, the token was "
            "wrong, or the client did not answer.",
            "outcome",
        )
        self.refused = self._counter(
            "refused", "Sessions, and requests of open sessions, refused for lack of a slot.", "what", "code"
        )

    def _requests(self) -> None:
        self.requests_active = self._gauge(
            "requests_active", "Current requests by stage: `input`, `queue` or `engine`.", "stage"
        )
        self.requests = self._counter(
            "requests",
            "Ended requests. `code` is the error code, empty without an error.",
            *("origin", "finish_reason", "code"),
        )
        self.first_output_seconds = self._histogram(
            "time_to_first_output_seconds",
            "From the end of the input to the first output of any kind; 0 if output preceded that end.",
            WAITS,
            "origin",
        )
        self.first_audio_seconds = self._histogram(
            "time_to_first_audio_seconds",
            "From the end of the input to the first audio; 0 if audio preceded that end.",
            WAITS,
            "origin",
        )
        self.request_seconds = self._histogram(
            "request_duration_seconds", "From the first chunk of a request to its final.", LONG, "origin"
        )
        self.stage_seconds = self._histogram(
            "stage_duration_seconds",
            "Stages of a request: `input` until its start policy fired, `queue` until the engine took it, `engine` "
            "until the engine finished. Input may still arrive during the later stages.",
            WAITS,
            "stage",
        )
        self.interrupt_seconds = self._histogram(
            "interrupt_seconds",
            "From a cancel, a barge-in or an interrupting request until the engine has stopped.",
            SHORT,
            "by",
        )

    def _turns(self) -> None:
        self.turn_part_seconds = self._histogram(
            "turn_part_seconds",
            "What answers waited for, one part after the other: `turn_decision` from the end of the speech until the "
            "turn was taken for ended, `queue` until the engine began, `recognition` until the words were known, "
            "`llm_first_token`, `first_clause` until the voice had text, `voice` until it had sound, `sending`, and "
            "`playing` until the client played it, if it tells. The parts of an answer sum up to the whole.",
            WAITS,
            "part",
        )
        self.mouth_to_ear_seconds = self._histogram(
            "mouth_to_ear_seconds",
            "From the end of the user's speech to the first sound of the answer that the client played.",
            WAITS,
            "origin",
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "From the moment when the LLM had all of its input to its first token, also of answers begun at a pause.",
            WAITS,
        )
        self.request_tokens = self._histogram(
            "request_tokens", "Tokens of a chat request: `input` or `output`.", TOKENS, "type"
        )
        self.cached_tokens = self._counter("cached_tokens", "Input tokens whose computation was reused.")
        self.discarded_seconds = self._counter(
            "discarded_seconds", "Work on answers that were begun at a pause and thrown away."
        )
        self.discarded_tokens = self._counter(
            "discarded_tokens", "Tokens of such answers, where the engine tells how many there were."
        )

    def _input(self) -> None:
        self.input_chunks = self._counter("input_chunks", "Chunks accepted, in order or reordered.")
        self.input_bytes = self._counter("input_bytes", "Decoded payload of accepted chunks.")
        self.input_audio_seconds = self._counter("input_audio_seconds", "Input audio of ended requests.")
        self.duplicates = self._counter("input_duplicates", "Duplicate chunks, dropped.")
        self.reordered = self._counter("input_reordered", "Chunks that arrived ahead of a missing one.")
        self.reorder_wait_seconds = self._counter("input_reorder_wait_seconds", "Total time that such chunks waited.")
        self.gap_seconds = self._counter(
            "input_gap_seconds", "Total time that input streams were stalled by a missing chunk."
        )
        self.speech_turns = self._counter("speech_turns", "Speech turns detected.")
        self.listening_seconds = self._counter("listening_seconds", "Thread time spent on turn detection.")
        self.listening_pieces = self._counter("listening_pieces", "Pieces of audio that turn detection processed.")
        self.turn_questions = self._counter(
            "turn_questions",
            "Questions of `semantic_vad` whether a speaker who pauses has finished: `finished`, `unfinished`, `failed` "
            "or `skipped`, as too many waited. One is dropped where the speaker goes on first.",
            "answer",
        )
        self.turn_question_seconds = self._counter("turn_question_seconds", "Thread time spent on such questions.")

        self.webrtc_packets = self._counter(
            "webrtc_packets",
            "Packets of speech over WebRTC: `on_time`; `reordered` into their place; `late`, after they were given up; "
            "`duplicate`; `lost`; or `dropped`, as the session could not take them.",
            "outcome",
        )
        self.webrtc_concealed_seconds = self._counter(
            "webrtc_concealed_seconds", "Speech that was lost over WebRTC and replaced."
        )

    def _output(self) -> None:
        self.output_audio_seconds = self._counter("output_audio_seconds", "Audio sent to clients.")
        self.player_lead_seconds = self._histogram(
            "player_lead_seconds",
            "Lowest lead of an answer's audio over its playback, by the client's `played_ms`.",
            WAITS,
        )
        self.player_underruns = self._counter("player_underruns", "Underruns of clients that report `played_ms`.")
        self.player_underrun_seconds = self._counter("player_underrun_seconds", "Total silence caused by underruns.")
        self.stall_seconds = self._counter(
            "output_stall_seconds", "Total time that answers were blocked by clients that did not read."
        )
        self.stalls = self._counter("output_stalls", "Times that an answer was blocked so.")

    def _store(self) -> None:
        self.store_up = self._gauge("store_up", "1 if the store of sessions works, 0 while it is degraded.", "store")
        self.store_failures = self._counter(
            "store_failures", "Times that the store became degraded: it was `slow`, `full` or `gone`.", "reason"
        )
        self.store_commit_seconds = self._histogram("store_commit_seconds", "Duration of commits to the store.", SHORT)
        self.store_written_bytes = self._counter("store_written_bytes", "Bytes of snapshots and logs committed.")
        self.store_queued_bytes = self._gauge("store_queued_bytes", "Bytes that wait for a commit.")
        self.store_leases = self._gauge("store_leases", "Sessions that this process keeps in the store.")
        self.store_records = self._gauge(
            "store_records", "Sessions in the store, of all processes; counted once a minute."
        )
        self.store_bytes = self._gauge("store_bytes", "Size of the store, of all processes; measured once a minute.")
        self.store_takes = self._counter(
            "store_takes",
            "Sessions that were to be taken over: `taken`; `absent`; `held` by another process; or `unreadable`.",
            "outcome",
        )
        self.store_lost = self._counter(
            "store_lost", "Sessions that ended here because another process took them over, or they were deleted."
        )

    def _server(self) -> None:
        self.held_bytes = self._gauge(
            "held_bytes", "Input, decoded media, output, settings and history held for all sessions together."
        )
        self.held_bytes_limit = self._gauge("held_bytes_limit", "Limit of held bytes.")
        self.queue_bytes = self._gauge(
            "queue_bytes",
            "Bytes held by all sessions: `input` that no engine has consumed, `outbox` unread by clients, `journal` "
            "kept for a resume, `history` speech of earlier requests.",
            "hop",
        )
        self.queue_items = self._gauge(
            "queue_items",
            "Items held by all sessions: `reorder` chunks behind a gap, `outbox` messages unread by clients.",
            "hop",
        )
        self.engine_up = self._gauge("engine_up", "1 if the engine is healthy, else 0.", "engine")
        self.part_up = self._gauge(
            "part_up",
            "1 if a part of a composed engine is healthy, else 0: `asr`, `llm` or `tts`. Where the LLM hears or speaks "
            "by itself, it counts as that part.",
            "part",
        )
        self.part_failures = self._counter(
            "part_failures", "Failures of a part of a composed engine on a request: `asr`, `llm` or `tts`.", "part"
        )
        self.speculation = self._counter(
            "speculation",
            "Answers begun at a pause: `used` when the turn ended; not used, as the speaker `went_on`, the words "
            "`differed` or they `failed`; or `skipped`, as the LLM had enough to do.",
            "outcome",
        )
        self.engine_active = self._gauge("engine_active_requests", "Requests in the engine.", "engine")
        self.draining = self._gauge("draining", "1 while the server drains, else 0.")
        self.loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds",
            "Lag of the event loop, measured ten times a second; once a second while it is idle.",
            SHORT,
        )
        self.http_connections = self._gauge("http_connections", "Open HTTP connections.")
        self.websocket_connections = self._gauge("websocket_connections", "Open WebSocket connections.")
        self.webrtc_calls = self._gauge("webrtc_calls", "Calls over WebRTC, from their answer to their end.")
        self.http_requests = self._counter(
            "http_requests",
            "HTTP requests by path template (`unmatched`: none) and status (101: a WebSocket; 0: the client "
            "disconnected before a response).",
            *("method", "route", "status"),
        )
        self.http_request_seconds = self._histogram(
            "http_request_duration_seconds", "From the head of a request to the end of its response.", LONG, "route"
        )
        self.grpc_calls = self._counter("grpc_calls", "Calls of the gRPC service salience.v1.", "method", "status")
        self.grpc_call_seconds = self._histogram(
            "grpc_call_duration_seconds", "Duration of calls of salience.v1.", LONG, "method"
        )
        self.info = self._gauge("info", "Always 1; the labels tell version and engine.", "version", "engine")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        self._describe(f"{name}_total", "counter", labels, meaning)
        return Counter(f"omni_ws_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        self._describe(name, "gauge", labels, meaning)
        return Gauge(f"omni_ws_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self._describe(name, "histogram", labels, meaning)
        return Histogram(f"omni_ws_{name}", meaning, labels, registry=self.registry, buckets=buckets)

    def _describe(self, name: str, kind: str, labels: tuple[str, ...], meaning: str) -> None:
        self.descriptions.append(Description(f"omni_ws_{name}", kind, labels, meaning))

    def families(self) -> list[Metric]:
        """Collect all metrics, after calling the functions in ``before_reading``.

        The metrics of the default registry are included: those of the process, and of libraries such as vLLM.
        """
        for prepare in self.before_reading:
            prepare()
        return [*self.registry.collect(), *REGISTRY.collect()]


def rendered(families: Iterable[Metric], accept: str) -> Callable[[], tuple[bytes, str]]:
    """Return a function that encodes metrics: it returns the body and its media type for the Accept header ``accept``.

    The function may run in another thread.
    """
    encode, media_type = choose_encoder(accept)
    return lambda: (encode(_Collected(families)), media_type)


class _Collected(Collector):
    """A collector of metrics that are collected already, since Prometheus's encoders accept only collectors."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
