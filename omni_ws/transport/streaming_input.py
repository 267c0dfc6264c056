"""``/v1/streaming_input``: the handshake of the native WebSocket, and the session behind it."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode
from websockets.protocol import State

from omni_ws.config.keys import ApiKey
from omni_ws.core.chunks import Modality
from omni_ws.errors import NotFound, OmniError, SessionNotFound, websocket_close_code
from omni_ws.service.identifiers import new_id
from omni_ws.service.session_factory import STREAM_FORMATS, SessionFactory
from omni_ws.transport.application import UpgradeDecision
from omni_ws.transport.authentication import Authenticator
from omni_ws.transport.http_request import HttpRequest
from omni_ws.transport.keep_alive import KeepAliveSettings
from omni_ws.transport.websocket import CLOSE_TIMEOUT_SEC, WebSocketSession
from omni_ws.transport.websocket_connection import StreamConnection
from omni_ws.wire.server_frames import (
    Capabilities,
    SessionCreated,
    SessionLimits,
    encode_frame,
    error_frame,
)
from omni_ws.wire.streaming_body import max_line_bytes

SUBPROTOCOL_JSON: Final = "omni.v1+json"
SUBPROTOCOL_BINARY: Final = "omni.v1+binary"


def chosen_subprotocol(request: HttpRequest) -> str | None:
    """The first that the client offers of those that there are."""
    return next((one for one in request.offered_subprotocols if one in (SUBPROTOCOL_BINARY, SUBPROTOCOL_JSON)), None)


async def refuse(connection: StreamConnection, error: OmniError) -> None:
    """There is no session for this connection, and its client is told why."""
    connection.ignore_messages()
    if connection.state is State.OPEN:
        # Without waiting: what is sent is small, and the client may not read at all.
        connection.protocol.send_text(encode_frame(error_frame(error)))
        connection.send_data()
    await connection.close_within(
        CLOSE_TIMEOUT_SEC, websocket_close_code(error) or CloseCode.INTERNAL_ERROR, error.code
    )


class NativeConnection(StreamConnection):
    """A connection that knows what its handshake settled: the key, and the form of the audio output."""

    def __init__(
        self, *arguments: Any, key: ApiKey | None, binary_audio: bool, refusal: OmniError | None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.key = key
        self.binary_audio = binary_audio
        #: Why there will be no session, told in a frame.
        self.refusal = refusal


class StreamingInput:
    """Accepts the handshakes and serves the sessions; knows those that are live."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._live: set[WebSocketSession] = set()
        streaming = sessions.config.streaming_input
        self._keep_alive = KeepAliveSettings(
            ping_interval=streaming.ping_interval_sec or None, ping_timeout=streaming.ping_timeout_sec or None
        )

    def upgrade(self, request: HttpRequest) -> UpgradeDecision:
        """Raises what is told by an HTTP status: 404, 401. Everything else is told by an error frame."""
        if not self._sessions.config.streaming_input.enabled:
            raise NotFound("streaming input is turned off on this server")
        key = self._authenticator.authenticate(request)
        refusal: OmniError | None = None
        if "resume_token" in request.query:
            refusal = SessionNotFound("sessions cannot be resumed in this version", param="session_id")
        subprotocol = chosen_subprotocol(request)
        return UpgradeDecision(
            connection=partial(
                NativeConnection,
                key=key,
                binary_audio=subprotocol == SUBPROTOCOL_BINARY,
                refusal=refusal,
                input_pace=self._sessions.admission.input_pace(key),
            ),
            subprotocol=subprotocol,
            max_size=max_line_bytes(self._sessions.config.streaming_input.max_chunk_bytes),
        )

    async def serve(self, connection: ServerConnection) -> None:
        """The life of one connection, from the end of its handshake."""
        assert isinstance(connection, NativeConnection)
        try:
            if connection.refusal is not None:
                raise connection.refusal
            with self._sessions.admission.session(connection.key, many_requests=True):
                self._sessions.check_ready()
                await self._run(connection)
        except OmniError as error:
            # A browser cannot read the status of a handshake, so what is not its own fault is said in a frame.
            await refuse(connection, error)

    async def _run(self, connection: NativeConnection) -> None:
        key = connection.key
        new = self._sessions.open(
            output_formats=STREAM_FORMATS,
            owner=None if key is None else key.name,
            admit=partial(self._sessions.admission.request, key),
        )
        session = WebSocketSession(
            connection,
            new.conversation,
            new.outbox,
            binary_audio=connection.binary_audio,
            keep_alive=self._keep_alive,
        )
        new.outbox.put_nowait(self._created(new.conversation.configuration.effective))
        self._live.add(session)
        try:
            await session.run()
        finally:
            self._live.discard(session)

    def drain(self, time_left: float) -> None:
        """Sessions end when their open requests are answered."""
        for session in tuple(self._live):
            session.drain(time_left)

    def end_all(self, error: OmniError) -> None:
        for session in tuple(self._live):
            session.end(error)

    def _created(self, config: Any) -> SessionCreated:
        streaming = self._sessions.config.streaming_input
        capabilities = self._sessions.engine.capabilities
        return SessionCreated(
            session_id=new_id("sess_"),
            resume_token=None,
            expires_in=streaming.session_timeout_sec,
            model=config.model,
            input_audio=config.input_audio,
            output_audio=config.output_audio,
            start_policy=config.start_policy,
            after_start=config.after_start,
            capabilities=Capabilities(
                input_modalities=sorted(capabilities.input_modalities),
                output_modalities=sorted(capabilities.output_modalities),
                tasks=sorted(capabilities.tasks),
                voices=list(capabilities.voices),
                sampling=sorted(capabilities.sampling),
                sampling_no_ops=sorted(capabilities.sampling_no_ops),
                extend=capabilities.extend,
                tools=capabilities.tools,
                logprobs=capabilities.logprobs,
                structured_output=capabilities.structured_output,
                turn_detection=self._sessions.speech_workers.available
                and Modality.AUDIO in capabilities.input_modalities,
                resume=False,
            ),
            limits=SessionLimits(
                max_chunk_bytes=streaming.max_chunk_bytes,
                max_payload_per_session=streaming.max_payload_per_session,
                reorder_window_chunks=streaming.reorder_window_chunks,
                reorder_timeout_sec=streaming.reorder_timeout_sec,
                max_pending_requests=streaming.max_pending_requests,
            ),
        )
