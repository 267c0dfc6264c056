"""``/v1/telephony/media-stream``: telephone calls, over the media stream of a gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from omni_ws.config.keys import ApiKey, key_name
from omni_ws.core.chunks import AudioEncoding
from omni_ws.errors import OmniError, ShuttingDown, Unauthenticated
from omni_ws.service.recording.recorder import Recorder
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.live_session import LiveSession, LiveSessions
from omni_ws.transport.http.access import KEY_SUBPROTOCOLS, Authenticator
from omni_ws.transport.http.application import LiveFrontEnd, Router, UpgradeDecision, needs_upgrade
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.keep_alive import KeepAliveSettings
from omni_ws.transport.recording.recordings import recorded
from omni_ws.transport.telephony.call import TELEPHONY_ORIGIN, call_configuration
from omni_ws.transport.telephony.messages import SAMPLE_RATE, StreamStart
from omni_ws.transport.telephony.opening import StreamOpening
from omni_ws.transport.telephony.stream_call import StreamCall, close_code

TELEPHONY_PATH: Final = "/v1/telephony/media-stream"
#: A message of 20 ms of audio has some 300 bytes.
MAX_MESSAGE_BYTES: Final = 64 * 1024
#: The custom parameter of a gateway that cannot send headers, and those that configure the session.
KEY_PARAMETER: Final = "api_key"
SESSION_PARAMETERS: Final = ("voice", "instructions", "greeting")

_AUDIO: Final = {"format": AudioEncoding.PCMU.value, "sample_rate": SAMPLE_RATE}


@dataclass(slots=True, kw_only=True)
class _Caller:
    """The caller behind a connection. Where the handshake has no key, ``start`` may bring one."""

    client: str
    presents_key: bool
    key: ApiKey | None = None
    pace: Callable[[int], float] | None = None

    def input_pace(self, size: int) -> float:
        return 0 if self.pace is None else self.pace(size)


class TelephonyStreams(LiveFrontEnd):
    """Accepts the handshakes of gateways, and opens a session for each stream that starts."""

    def __init__(
        self, sessions: SessionFactory, authenticator: Authenticator, recorder: Recorder | None = None
    ) -> None:
        # A gateway does not reconnect: a session ends with its connection.
        super().__init__(LiveSessions(sessions, origin=TELEPHONY_ORIGIN, grace=0))
        self._sessions = sessions
        self._authenticator = authenticator
        self._recorder = recorder
        self._openings: set[StreamOpening] = set()
        self._keep_alive = KeepAliveSettings.configured(sessions.config.streaming_input)

    def register(self, router: Router) -> None:
        if self._sessions.config.telephony.enabled:
            router.add("GET", TELEPHONY_PATH, needs_upgrade)
            router.add_websocket(TELEPHONY_PATH, self.upgrade)

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Raises Unauthenticated for an unknown key. A handshake without one may bring it with ``start``."""
        presents_key = "authorization" in request.headers or any(
            entry.startswith(KEY_SUBPROTOCOLS) for entry in request.offered_subprotocols
        )
        caller = _Caller(client=request.client, presents_key=presents_key)
        if presents_key:
            self._identify(caller, self._authenticator.authenticate(request))
        return UpgradeDecision(
            connection=partial(
                StreamConnection,
                input_pace=caller.input_pace,
                budget=self._sessions.budget,
                write_timeout=self._sessions.config.streaming_input.write_timeout_sec,
            ),
            serve=partial(self._serve, caller),
            route=TELEPHONY_PATH,
            max_size=MAX_MESSAGE_BYTES,
        )

    async def _serve(self, caller: _Caller, connection: StreamConnection) -> None:
        """One connection, from the end of its handshake to its close."""
        opening = StreamOpening(connection)
        self._openings.add(opening)
        try:
            start = await opening.wait(self._sessions.config.http.header_timeout_sec)
            if start is None:
                return
            session = await self._begin(caller, start)
        except OmniError as error:
            await opening.close(close_code(error), error.message)
            return
        finally:
            self._openings.discard(opening)
        # From here on: the start message may hold a key.
        connection = recorded(connection, session.recording)
        call = StreamCall(connection, session, start.stream_sid, keep_alive=self._keep_alive)
        behind = opening.behind
        del start, opening  # with all parameters of the call, which it does not need
        session.attach(call)
        session.conversation.greet()
        await call.run(behind)

    async def _begin(self, caller: _Caller, start: StreamStart) -> LiveSession:
        """Raises what the stream is refused with."""
        if not caller.presents_key:
            self._identify(caller, self._key_of(start))
        key = caller.key
        session = await self._live.admit(key, client=caller.client)
        try:
            given = start.custom_parameters
            fields = {name: given[name] for name in SESSION_PARAMETERS if name in given}
            session.conversation.configure(call_configuration(_AUDIO, **fields))
        except OmniError:
            session.end(None)
            raise
        if self._recorder is not None:
            session.recording = self._recorder.begin(TELEPHONY_ORIGIN, key=key_name(key), name=session.session_id)
        return session

    def _identify(self, caller: _Caller, key: ApiKey | None) -> None:
        caller.key, caller.pace = key, self._sessions.admission.input_pace(key)

    def _key_of(self, start: StreamStart) -> ApiKey | None:
        presented = start.custom_parameters.get(KEY_PARAMETER)
        if presented is None:
            return self._authenticator.authenticate_header(None)
        if not presented.isascii():
            raise Unauthenticated("this key is not known here")
        return self._authenticator.authenticate_header(f"Bearer {presented}")

    def drain(self, time_left: float) -> None:
        self._refuse_openings(ShuttingDown("the server is shutting down"))
        super().drain(time_left)

    def end_all(self, error: OmniError) -> None:
        self._refuse_openings(error)
        super().end_all(error)

    def _refuse_openings(self, error: OmniError) -> None:
        for opening in self._openings:
            opening.refuse(error)
