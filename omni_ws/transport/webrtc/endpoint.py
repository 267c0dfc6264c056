"""The front end of calls over WebRTC: answers the SDP offers at ``/v1/realtime/calls`` and ``/v1/live/sessions``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from websockets.frames import CloseCode

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import (
    InvalidFrame,
    InvalidValue,
    SessionNotFound,
    ShuttingDown,
    UnsupportedFormat,
    UnsupportedParameter,
    WebrtcOff,
)
from omni_ws.installing import install_command
from omni_ws.metrics import Metrics
from omni_ws.service import new_id
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.transport.http.application import Application, Router, SessionFrontEnd, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.exchange import FORM_TYPE, HttpExchange, read_form, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import PeerRounds
from omni_ws.transport.realtime.kept import TOKEN, KeptLive, check_kept, read_live
from omni_ws.transport.realtime.live import (
    FORK_PATH,
    LIVE_PATH,
    LiveDialect,
    live_id,
    session_of,
)
from omni_ws.transport.realtime.realtime import RealtimeDialect
from omni_ws.transport.realtime.session import (
    CALL_ID,
    REALTIME_ORIGIN,
    REALTIME_PATH,
    RealtimeCaller,
    Sideband,
    accepted,
)
from omni_ws.transport.recording import (
    begin_recording,
    recorded_channel,
)
from omni_ws.wire.frames import loads_object
from omni_ws.wire.openai_fields import object_field
from omni_ws.wire.realtime_events import RealtimeRefusal, error_fields, read
from omni_ws.wire.realtime_session import merged_session
from omni_ws.wire.session_config import DEFAULT_MAX_LEAD_MS

if TYPE_CHECKING:
    from omni_ws.transport.webrtc.call import Call, CallChannel

CALLS_PATH: Final = f"{REALTIME_PATH}/calls"
#: Label of the sessions in metrics, logs and recordings.
WEBRTC_ORIGIN: Final = "webrtc"
SDP_TYPE: Final = "application/sdp"
MAX_OFFER_BYTES: Final = 64 * 1024
#: Limit of a form that holds the offer and the session settings.
MAX_BODY_BYTES: Final = 256 * 1024
#: Settings that the transport decides, whatever the client sets: the audio formats of the tracks; and paced answers, as
#: the server sends audio in real time.
_AUDIO: Final = {"format": AudioEncoding.PCM16.value, "sample_rate": 24_000}
_MEDIA: Final = {"input_audio": _AUDIO, "output_audio": _AUDIO, "max_lead_ms": DEFAULT_MAX_LEAD_MS}
#: The module of calls, loaded with the first call.
_CALL_MODULE: Final = "omni_ws.transport.webrtc.call"
#: The packages that this module loads.
_PACKAGES: Final = ("aiortc", "aioice", "cryptography", "pylibsrtp", "pyopenssl", "cffi", "dnspython")


@dataclass(frozen=True, slots=True)
class _Running:
    """A running call with its task, and the name of the key that opened it. ``live``: whether it is a Live session."""

    owner: str | None
    live: bool
    call: Call
    task: asyncio.Task[None]


#: Makes the call of a session over a channel.
_Make: TypeAlias = "Callable[[Session, CallChannel], Call]"


class WebrtcCalls(SessionFrontEnd):
    """The front end of calls over WebRTC: answers offers, and runs the calls. Loads aiortc with the first call."""

    def __init__(self, app: Application) -> None:
        super().__init__(app, Sessions(app.sessions, origin=WEBRTC_ORIGIN, grace=0, any_model=True))
        self._rounds = PeerRounds.configured(self._config.streaming_input)
        #: The running calls, by call id.
        self._calls: dict[str, _Running] = {}

    def register(self, router: Router) -> None:
        if not self._config.streaming_input.enabled:
            return
        router.add("POST", CALLS_PATH, self.create)
        router.add("POST", f"{CALLS_PATH}/{{call_id}}/hangup", self.hang_up)
        router.add_websocket(REALTIME_PATH, self.join, takes=lambda request: CALL_ID in request.query)
        router.add("POST", LIVE_PATH, self.create_live)
        one = f"{LIVE_PATH}/{{session_id}}"
        router.add("POST", f"{one}/hangup", self.hang_up_live)
        router.add("GET", f"{one}/attach", needs_upgrade)
        router.add_websocket(f"{one}/attach", self.attach)
        router.add("POST", FORK_PATH, self.fork_live)
        for step in ("accept", "reject", "refer"):
            router.add("POST", f"{one}/{step}", self.refuse)

    def connect_gauges(self, metrics: Metrics) -> None:
        metrics.webrtc_calls.set_function(lambda: len(self._calls))

    def serves(self, session_id: str) -> bool:
        call_id = f"rtc_{session_id.removeprefix(f'{self._config.replica_id}_')}"  # which has no replica_id
        return call_id in self._calls or super().serves(session_id)

    # calls of the Realtime API

    async def create(self, exchange: HttpExchange) -> None:
        """Answer the SDP offer of a Realtime session.

        Raises Unauthenticated, WebrtcOff, ModelNotFound, the errors of an invalid offer or invalid session settings,
        and what ``Sessions.admit`` raises.
        """
        caller = RealtimeCaller.of(exchange.request, *self._identified(exchange.request, REALTIME_ORIGIN))
        self._check_served()
        self._sessions.any_model.check(exchange.request.query.get("model"))
        offer, given = await _read_body(exchange)

        def make(session: Session, channel: CallChannel) -> Call:
            from omni_ws.transport.webrtc.call import RealtimeCall

            dialect = RealtimeDialect(session, self._sessions, merged_session(caller.bound, given), media=_MEDIA)
            return RealtimeCall(channel, session, dialect, self._sessions.metrics)

        worker = self._sessions.worker
        call_id = new_id(f"rtc_{worker}_" if worker else "rtc_")
        _, answer = await self._begin(caller.key, caller.address, offer, make, call_id=call_id)
        headers = [("Content-Type", SDP_TYPE), ("Location", f"{CALLS_PATH}/{call_id}")]
        await exchange.respond(201, headers, answer.encode())

    async def hang_up(self, exchange: HttpExchange) -> None:
        """End a call, and respond when it is over.

        Raises Unauthenticated, and SessionNotFound if the key has no such call.
        """
        key, _ = self._identified(exchange.request, REALTIME_ORIGIN)
        await self._hang_up(exchange, self._find(exchange.path_parameters["call_id"], key))

    def join(self, request: HttpRequest) -> UpgradeDecision:
        """Accept the handshake of a sideband. A client secret does not suffice, since web pages have it.

        Raises Unauthenticated, SessionNotFound if the key has no such call, and SessionConflict if the call has its
        full number of sidebands.
        """
        key = self._authenticator.authenticate(request)
        running = self._find(request.query.get(CALL_ID), key)
        return self._accept(request, key, running, route=REALTIME_PATH)

    # calls of the Live API

    async def create_live(self, exchange: HttpExchange) -> None:
        """Answer the SDP offer of a Live session. A client secret does not suffice. Raises what ``create`` raises."""
        key = self._authenticator.authenticate(exchange.request)
        self._check_served()
        await self._create_live(exchange, key, None)

    async def fork_live(self, exchange: HttpExchange) -> None:
        """Answer the SDP offer of a Live session that continues a stored one. Raises what ``read_live`` raises, too."""
        request = exchange.request
        key = self._authenticator.authenticate(request)
        store = check_kept(self._sessions.store, "fork")
        self._check_served()
        session_id = session_of(exchange.path_parameters["session_id"])
        token = None if key is not None else request.query.get(TOKEN) or ""
        await self._create_live(exchange, key, await read_live(store, session_id, key, token))

    async def _create_live(self, exchange: HttpExchange, key: ApiKey | None, forked: KeptLive | None) -> None:
        body, _ = await read_json_object(exchange, MAX_BODY_BYTES)
        transport = object_field(body, "transport")
        if transport.get("type") != "webrtc":
            raise UnsupportedParameter("the only transport here is webrtc", param="transport.type")
        offer = read(transport.get("sdp"), str, "transport.sdp")
        given = object_field(body, "session") if forked is None or body.get("session") is not None else {}

        dialect: LiveDialect | None = None

        def make(session: Session, channel: CallChannel) -> Call:
            nonlocal dialect
            from omni_ws.transport.webrtc.call import LiveCall

            most = None if key is None else key.max_session_sec
            media = AudioFormat(sample_rate=24_000)
            dialect = LiveDialect(session, self._sessions, max_sec=most, media=media, forked=forked)
            call = LiveCall(channel, session, dialect, self._sessions.metrics)
            call.keep_in(self._sessions.store, key)
            try:
                call.start(given)
            except BaseException:
                call.drop_record()
                call.release()
                raise
            return call

        try:
            call_id, answer = await self._begin(key, exchange.request.client, offer, make)
        except RealtimeRefusal as error:  # whose code is of this API alone
            await exchange.respond_json(400, {"error": error_fields(error)})
            return
        token = {"resume_token": dialect.token} if dialect is not None and dialect.token else {}
        shown = {"session": {"id": call_id, **token}, "transport": {"type": "webrtc", "sdp": answer}}
        await exchange.respond_json(201, shown, [("Location", f"{LIVE_PATH}/{call_id}")])

    async def hang_up_live(self, exchange: HttpExchange) -> None:
        """End a Live session over WebRTC, and respond when it is over.

        Raises Unauthenticated, and SessionNotFound if the key has no such session.
        """
        key = self._authenticator.authenticate(exchange.request)
        await self._hang_up(exchange, self._find(exchange.path_parameters["session_id"], key, live=True))

    def attach(self, request: HttpRequest) -> UpgradeDecision:
        """Accept the handshake of a sideband of a Live session over WebRTC. Raises what ``join`` raises."""
        key = self._authenticator.authenticate(request)
        running = self._find(request.segments[-2], key, live=True)
        return self._accept(request, key, running, route=f"{LIVE_PATH}/{{session_id}}/attach")

    async def refuse(self, exchange: HttpExchange) -> None:
        """Raise UnsupportedParameter, since there are no telephone calls (SIP); before that, Unauthenticated."""
        self._authenticator.authenticate(exchange.request)
        step = exchange.request.segments[-1]
        raise UnsupportedParameter(f"{step} is not offered here: there are no telephone calls (SIP)", param=step)

    # all calls

    def _check_served(self) -> None:
        if not self._config.webrtc.enabled:
            raise WebrtcOff("WebRTC is switched off here (webrtc.enabled); use the WebSocket /v1/realtime")
        if not self._sessions.takes_calls:
            raise WebrtcOff(f"WebRTC needs a package that is not installed here: {install_command('webrtc')}")

    async def _begin(
        self, key: ApiKey | None, address: str, offer: str, make: _Make, *, call_id: str | None = None
    ) -> tuple[str, str]:
        """Open a session, answer the SDP ``offer``, and run the call that ``make`` creates.

        Without ``call_id``, the call is a Live session. Returns the id of the call and the SDP answer.
        """
        await asyncio.to_thread(_load_aiortc)
        from omni_ws.transport.webrtc.call import check_offer

        offer = check_offer(offer)
        session = await self._live.admit(key, client=address)
        begin_recording(self._recorder, session, WEBRTC_ORIGIN, key)
        try:
            call, answer = await self._answer(session, key, make, offer, live=call_id is None)
        except BaseException:
            session.end(None)
            if session.recording is not None:  # its channel will never close
                session.recording.end()
            raise
        running_id = call_id or live_id(session.session_id)
        task = asyncio.create_task(call.run(), name=f"call {session.session_id}")
        self._calls[running_id] = _Running(key_name(key), call_id is None, call, task)
        task.add_done_callback(lambda ended: self._calls.pop(running_id))
        return running_id, answer

    async def _answer(
        self, session: Session, key: ApiKey | None, make: _Make, offer: str, *, live: bool
    ) -> tuple[Call, str]:
        """Create the call of a session, and attach the call. Returns the call and the SDP answer."""
        from omni_ws.transport.webrtc.call import CallChannel, answer_offer, new_peer

        peer = new_peer(self._config.webrtc)
        channel = CallChannel(
            peer,
            budget=session.conversation.account,
            input_pace=self._sessions.admission.input_pace(key),
            write_timeout=self._config.streaming_input.write_timeout_sec,
        )
        call: Call | None = None
        try:
            call = make(session, recorded_channel(channel, session.recording, LIVE_PATH if live else CALLS_PATH))
            answering = answer_offer(peer, offer, call.speaker, call.microphone, config=self._config.webrtc)
            answer = await _to_its_end(answering)
            if not session.is_open:  # it ended meanwhile, by a drain for example
                raise session.ended_by or ShuttingDown("the server is shutting down")
            channel.bound_fragments()
            session.attach(call)
        except BaseException:
            await channel.close_in_time(CloseCode.NORMAL_CLOSURE, "")
            if call is not None:
                call.drop_record()
                call.release()
            raise
        return call, answer

    def _accept(self, request: HttpRequest, key: ApiKey | None, running: _Running, *, route: str) -> UpgradeDecision:
        sidebands = running.call.sidebands
        sidebands.check_room()

        async def serve(connection: StreamConnection) -> None:
            await Sideband(connection, sidebands, rounds=self._rounds).run()

        return accepted(request, self._sessions, key, serve=serve, route=route)

    async def _hang_up(self, exchange: HttpExchange, running: _Running) -> None:
        running.call.hang_up()
        await asyncio.wait([running.task])
        await exchange.respond(200)

    def _find(self, call_id: str | None, key: ApiKey | None, *, live: bool = False) -> _Running:
        """Return the call with this id; ``live``: a call of the Live API. Raises SessionNotFound if there is none."""
        running = self._calls.get(call_id or "")
        if running is None or running.owner != key_name(key) or running.live is not live:
            raise SessionNotFound("there is no such call", param="session_id" if live else CALL_ID)
        return running

    async def wait_closed(self) -> None:
        await super().wait_closed()
        if self._calls:
            await asyncio.wait([running.task for running in self._calls.values()])


async def _to_its_end(gathering: Coroutine[Any, Any, str]) -> str:
    """Await ``gathering`` to its end, even if the caller is cancelled meanwhile; then raise that cancellation.

    Whatever aioice is making has no owner yet: if the gathering were cancelled, its sockets and its relays at a TURN
    server would stay open. aioice waits for at most five seconds for the ICE servers.
    """
    task = asyncio.create_task(gathering, name="answer to an offer")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _read_body(exchange: HttpExchange) -> tuple[str, Mapping[str, Any]]:
    """Read the SDP offer, and the session settings that come with it; {} if there are none."""
    kind = exchange.request.content_type
    session = b""
    if kind == SDP_TYPE:
        offer = await exchange.read_body(MAX_OFFER_BYTES)
    elif kind == FORM_TYPE:
        parts = {part.name: bytes(part.data) for part in await read_form(exchange, MAX_BODY_BYTES)}
        if "sdp" not in parts:
            raise InvalidValue("the form has no part sdp", param="sdp")
        offer, session = parts["sdp"], parts.get("session", b"")
    else:
        raise UnsupportedFormat(f"the body must be {SDP_TYPE} or {FORM_TYPE}", param="Content-Type")
    try:
        return offer.decode(), loads_object(session) if session else {}
    except UnicodeDecodeError:
        raise InvalidFrame("the body is not valid UTF-8") from None


def _load_aiortc() -> None:
    """Import the module of calls, and aiortc with it. Blocks for a second if the files come from a disk.

    The files are read before the import: Python's loader would wait for the disk while it holds the interpreter lock,
    and so block the event loop.
    """
    if _CALL_MODULE not in sys.modules:
        piece = bytearray(1 << 20)
        for package in _PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError, OSError):
                for path in metadata.files(package) or ():
                    with open(path.locate(), "rb", buffering=0) as file:
                        while file.readinto(piece):
                            pass
    importlib.import_module(_CALL_MODULE)
