"""A call over WebRTC: its SDP offer and answer, its data channel, and its tracks. Imports aiortc, which is slow."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, Final

from aioice.ice import Connection
from aioice.turn import TurnTransport
from aiortc import (
    InvalidStateError,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCIceTransport,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCRtpSender,
    RTCSctpTransport,
    RTCSessionDescription,
)
from aiortc.exceptions import OperationError
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtcsctptransport import (
    LOCAL_MAX_MESSAGE_SIZE,
    SCTP_DATA_LAST_FRAG,
    DataChunk,
    InboundStream,
    tsn_plus_one,
)
from aiortc.sdp import SessionDescription
from av import Packet
from websockets.frames import CloseCode

from omni_ws.audio.compressed import PACKET_BYTES, SAMPLE_RATE, OpusPacketDecoder, OpusPacketEncoder
from omni_ws.config.model import WebrtcConfig
from omni_ws.core.chunks import AudioFormat
from omni_ws.core.quota import ByteBudget, Share
from omni_ws.core.reorder import CLOCK_RATE, JitterBuffer, MediaPacket, PacketOutcome
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import (
    ORDERLY_ENDS,
    EngineOverloaded,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    SlowConsumer,
    UnsupportedFormat,
)
from omni_ws.installing import check_private_names
from omni_ws.metrics import Metrics
from omni_ws.service import (
    new_id,
    unexpected,
)
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.sessions.session import Session
from omni_ws.transport.native.connection import FrameReceiver, Pause, PausedReading
from omni_ws.transport.native.keep_alive import NO_PINGS
from omni_ws.transport.native.tcp_link import Playout
from omni_ws.transport.realtime.items import Event, request_id_of
from omni_ws.transport.realtime.live import LiveConnection, LiveDialect
from omni_ws.transport.realtime.realtime import BACKCHANNEL, RealtimeDialect
from omni_ws.transport.realtime.session import MIRRORED_AUDIO, RealtimeConnection, Sidebands, write_event
from omni_ws.wire.live_session import DataChannel
from omni_ws.wire.server_frames import SpeechConfirmedFrame, SpeechDismissedFrame, SpeechStartedFrame

logger = logging.getLogger(__name__)

#: Seconds within which the data channel must open after the answer to an offer.
SETUP_TIMEOUT_SEC: Final = 30.0
#: aioice's attribute for the task that asks a TURN server to release an address, for up to a minute.
_RELEASE: Final = "_TurnTransport__close_task"
#: aiortc's attribute for its jitter buffer, which waits for 320 ms at the first loss, and keeps that delay until the
#: call ends.
_BUFFER: Final = "_RTCRtpReceiver__jitter_buffer"
#: aiortc's attribute for the queue of its decoder's thread. None in it ends the thread, which is not used here.
_DECODER_QUEUE: Final = "_RTCRtpReceiver__decoder_queue"
check_private_names("aioice", {Connection: ("_protocols",), TurnTransport: (_RELEASE,)})
check_private_names(
    "aiortc",
    {
        RTCIceTransport: ("_connection",),
        RTCRtpReceiver: (_BUFFER, _DECODER_QUEUE),
        RTCSctpTransport: ("_inbound_streams", "_receive_data_chunk"),
        InboundStream: ("reassembly",),
    },
)
#: The sound of both tracks, as it is recorded.
TRACK: Final = AudioFormat(sample_rate=SAMPLE_RATE)
#: In place of a response id in the playout: audio that belongs to no response.
_BESIDE: Final = ""
#: What a sideband may not send, and why.
_REFUSED: Final = {"input_audio_buffer.append": "the audio of a call comes by its track: a sideband cannot append any"}


class Call(RealtimeConnection):
    """The connection of a WebRTC call's session: events travel over the data channel, speech over the tracks.

    Sidebands see the same events, and may command the session as well.
    """

    def __init__(
        self,
        channel: CallChannel,
        session: Session,
        dialect: RealtimeDialect | LiveDialect,
        metrics: Metrics,
        *,
        refused: Mapping[str, str],
    ) -> None:
        """``refused`` maps the types of events that a sideband may not send to the reason."""
        super().__init__(channel, session, dialect, rounds=NO_PINGS)
        self._channel = channel
        self._of_call = dialect
        self._dialect_known = True  # vLLM's clients do not call
        self._dropped = metrics.webrtc_packets.labels(PacketOutcome.DROPPED.value)
        self.microphone = CallMicrophone(self.hear, metrics)
        self.speaker = CallSpeaker(
            self._audio_started, self._audio_stopped, None if session.recording is None else self._record
        )
        self.sidebands = Sidebands(self, dialect.greeting, refused=refused)
        self._hold_commands()

    async def run(self) -> None:
        """Wait for the data channel, and serve the call to its end."""
        timer = self._loop.call_later(SETUP_TIMEOUT_SEC, self._session.end, None)
        try:
            first: list[asyncio.Future[Any]] = [self._channel.opened, self._over]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            self._opened()
            await super().run()
        finally:
            timer.cancel()
            self._closing(CloseCode.NORMAL_CLOSURE, "")
            self.release()

    def _opened(self) -> None:
        """Note that the data channel is open, or never will be."""
        self._hold_commands()

    def hang_up(self) -> None:
        """End the call, as the client requested."""
        self._session.end(None)

    def _closing(self, code: int, reason: str) -> None:
        self.sidebands.end(code, reason)

    def release(self) -> None:
        """Stop the tracks, and refund the bytes that the dialect has charged. May be called repeatedly."""
        self.speaker.stop()
        self.microphone.close()
        self._dialect.close()

    def hear(self, audio: bytes) -> None:
        """Pass speech of the caller (pcm16 at SAMPLE_RATE) to the conversation; drop it while no input is taken."""
        if not self._listening or not self._channel.heard(len(audio)):
            self._dropped.inc()
            return
        now = self._channel.heard_at
        if self._session.recording is not None:
            self._session.recording.sound(audio, TRACK, by_user=True)
        try:
            self._of_call.append(audio, now)
        except InvalidRequest as error:
            self._send([self._dialect.error(error)])
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the audio of a call"))
        self._conversation.stream.touch(now=now)
        self._pause_if_blocked()

    def _pause_if_blocked(self) -> None:
        super()._pause_if_blocked()
        self._hold_commands()

    def input_may_continue(self) -> None:
        super().input_may_continue()
        self._hold_commands()

    output_has_room = input_may_continue

    def _hold_commands(self) -> None:
        """Pause the commands of sidebands while the session has no room for input, or the caller has not connected."""
        self.sidebands.hold(self._reading_paused or not self._channel.opened.done())

    def _record(self, response_id: str, audio: bytes, in_sec: float) -> None:
        """Record a packet of audio, which the caller will hear in ``in_sec`` seconds."""
        if self._session.recording is not None:
            request_id = self._request_of(response_id)
            self._session.recording.sound(audio, TRACK, by_user=False, request_id=request_id, in_ms=in_sec * 1000)

    def _request_of(self, response_id: str) -> str | None:
        """Return the id of the request that a response answers; None if the response answers none."""
        return None

    def _audio_started(self, response_id: str) -> None:
        """Note that the caller begins to hear the audio of a response."""

    def _audio_stopped(self, response_id: str) -> None:
        """Note that the caller has heard the audio of a response to its end."""


class RealtimeCall(Call):
    """A call of the Realtime API.

    The server sends the audio of answers in real time. Therefore it also reports when the audio of a response begins
    and ends. When the caller interrupts an answer or a response is cancelled, it drops the audio that was not heard.
    While the caller speaks and it is undecided whether this interrupts the answer, it lowers the volume of the answer.
    """

    def __init__(self, channel: CallChannel, session: Session, dialect: RealtimeDialect, metrics: Metrics) -> None:
        super().__init__(channel, session, dialect, metrics, refused=_REFUSED)
        self._dialect: RealtimeDialect = dialect
        #: The id of the response that was cut short: its audio that is still to come is not played.
        self._cut: str | None = None

    def connection_closing(self) -> None:
        self.speaker.stop()
        super().connection_closing()

    async def _say_goodbye(self, error: OmniError) -> None:
        self._flush()
        if isinstance(error, ORDERLY_ENDS):
            await self.speaker.played()
        await super()._say_goodbye(error)

    # output

    def _request_of(self, response_id: str) -> str | None:
        return None if response_id == _BESIDE else request_id_of(response_id)

    def _render(self, message: ServerMessage) -> Iterator[Event]:
        match message:
            case SpeechStartedFrame(certain=False):
                self.speaker.duck(True)
            case SpeechConfirmedFrame() | SpeechDismissedFrame():
                self.speaker.duck(False)
        return super()._render(message)

    def _write(self, event: Event) -> None:
        match event["type"]:
            case "response.output_audio.delta":
                if event["response_id"] != self._cut:
                    self.speaker.say(event["response_id"], event["delta"])
                return
            case event_type if event_type == BACKCHANNEL:
                self.speaker.say(_BESIDE, event["delta"])
                self.speaker.finish(_BESIDE)
                return
            case "response.output_audio.done":
                self.speaker.finish(event["response_id"])
        if self.sidebands:
            event = {"event_id": new_id("event_"), **event}
            self.sidebands.write(event)
        super()._write(event)
        match event["type"]:
            case "input_audio_buffer.speech_started" if self._dialect.speech_interrupts:
                self._output_cleared(None)
            case "response.done" if event["response"]["status"] == "cancelled":
                self._output_cleared(event["response"]["id"])

    def _output_cleared(self, response_id: str | None) -> None:
        """Drop audio that was not played yet. ``response_id`` is the id of the cancelled response; None without one."""
        heard = [one for one in self.speaker.clear() if one != _BESIDE]
        self._cut = response_id or (heard[-1] if heard else self._cut)
        for one in heard:
            super()._output_cleared(one)

    def _audio_started(self, response_id: str) -> None:
        if response_id != _BESIDE:
            self._conversation.observed.timeline.played(request_id_of(response_id), self._loop.time())
            self._send([{"type": "output_audio_buffer.started", "response_id": response_id}])

    def _audio_stopped(self, response_id: str) -> None:
        if response_id != _BESIDE:
            self._send([{"type": "output_audio_buffer.stopped", "response_id": response_id}])


# Offers and answers (RFC 9429).

#: Addresses that an offer may name: the server sends packets to each of them, with the offer's ``ice-ufrag``.
MAX_CANDIDATES: Final = 16
#: Characters of ``ice-ufrag`` (RFC 8839, section 5.4).
MAX_UFRAG: Final = 256
_CANDIDATE: Final = "a=candidate:"
#: The type of the address that an ICE server gives, by the scheme of its URL (RFC 8839, section 5.1).
_GIVEN: Final = {"stun": "srflx", "turn": "relay", "turns": "relay"}


def new_peer(config: WebrtcConfig) -> RTCPeerConnection:
    """Create a peer connection that uses only the configured ICE servers."""
    credential = config.ice_credential
    servers = [
        RTCIceServer(
            urls=url,
            username=config.ice_username,
            credential=None if credential is None else credential.get_secret_value(),
        )
        for url in config.ice_servers
    ]
    return RTCPeerConnection(RTCConfiguration(iceServers=servers))


def check_offer(offer: str) -> str:
    """Check an SDP offer, and return it without lines that the library cannot handle well.

    Candidates with host names (mDNS, RFC 8828) are removed: to resolve them takes seconds and a multicast socket, and
    the caller's own packets show its address anyway. ``end-of-candidates`` is removed, since with it the library would
    not wait for these packets. Raises InvalidFrame, InvalidValue or UnsupportedFormat.
    """
    lines = [line for line in offer.splitlines() if line and line != "a=end-of-candidates"]
    lines = [line for line in lines if not line.startswith(_CANDIDATE) or _is_address(_address(line))]
    if sum(line.startswith(_CANDIDATE) for line in lines) > MAX_CANDIDATES:
        raise InvalidValue(f"an offer may have at most {MAX_CANDIDATES} candidates", param="sdp")
    offer = "\r\n".join([*lines, ""])
    try:
        media = SessionDescription.parse(offer).media
    except Exception:  # the library raises whatever its parser meets
        raise InvalidFrame("the offer is not valid SDP", param="sdp") from None
    kinds = [one.kind for one in media]
    if kinds.count("audio") != 1 or kinds.count("application") != 1 or len(kinds) != 2:
        raise UnsupportedFormat(f"an offer has one audio track and the data channel {LABEL}", param="sdp")
    for one in media:
        if one.dtls is None or not one.dtls.fingerprints or one.dtls.role is None:
            raise InvalidFrame("an offer must have a=fingerprint and a=setup", param="sdp")
        if one.ice is not None and len(one.ice.usernameFragment or "") > MAX_UFRAG:
            raise InvalidValue(f"a=ice-ufrag has at most {MAX_UFRAG} characters", param="sdp")
    return offer


async def answer_offer(
    peer: RTCPeerConnection, offer: str, speaker: CallSpeaker, microphone: CallMicrophone, *, config: WebrtcConfig
) -> str:
    """Connect the tracks to ``peer``, and return the SDP answer to an offer from ``check_offer``.

    Raises InvalidFrame or UnsupportedFormat. Logs which of the ICE servers gave no address.
    """
    peer.addTrack(speaker)
    (transceiver,) = peer.getTransceivers()
    codecs = RTCRtpSender.getCapabilities("audio").codecs
    transceiver.setCodecPreferences([codec for codec in codecs if codec.mimeType == "audio/opus"])
    microphone.connect(transceiver.receiver)
    try:
        await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
        await peer.setLocalDescription()
    except OperationError:
        raise UnsupportedFormat("the offer has no Opus", param="sdp") from None
    except ValueError as error:
        raise InvalidFrame(f"the offer is not acceptable: {str(error)[:100]}", param="sdp") from None
    answer: str = peer.localDescription.sdp
    for url in config.ice_servers:
        if f" typ {_GIVEN[url.partition(':')[0]]} " not in answer:  # the library does not say why
            logger.warning("%s of webrtc.ice_servers gave no address for a call", url)
    return announced(answer, config.announce)


def announced(answer: str, address: str | None) -> str:
    """Replace the machine's own addresses in an SDP answer by ``address``; None replaces nothing.

    Candidates with addresses of the machine in the other IP version are removed.
    """
    if address is None:
        return answer
    version = ipaddress.ip_address(address).version
    lines = []
    for line in answer.splitlines():
        if line.startswith(_CANDIDATE) and " typ host" in line:
            if ipaddress.ip_address(_address(line)).version != version:
                continue
            line = line.replace(f" {_address(line)} ", f" {address} ", 1)
        lines.append(line)
    return "\r\n".join([*lines, ""])


def _address(candidate: str) -> str:
    """Return the address in a candidate line (RFC 8839, section 5.1), split at any white space, as the library does."""
    return (candidate.split(maxsplit=5) + [""] * 5)[4]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# The channel of events.

#: The label of the data channel that OpenAI's clients open.
LABEL: Final = "oai-events"
#: The longest message, which the answer to an offer announces as ``max-message-size``. The library does not enforce it.
MAX_MESSAGE_BYTES: Final = LOCAL_MAX_MESSAGE_SIZE
#: Fragments that may wait for the rest of their messages, or for earlier fragments. For each new fragment, the library
#: searches all that wait.
MAX_FRAGMENTS: Final = 2048
#: The number of fragments after which the length of their messages is checked.
_FRAGMENTS_PER_LOOK: Final = 32
#: Unsent bytes above which writing pauses, and below which it resumes.
MAX_UNSENT_BYTES: Final = 1 << 20
_LOW_WATER_BYTES: Final = MAX_UNSENT_BYTES // 4
#: Bytes of events that may wait while reading is paused: aiortc offers no way to stop the peer.
MAX_UNREAD_BYTES: Final = 1 << 20
#: Bytes of a waiting event besides its text.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: How long the last events may take to be sent, and the library to close.
CLOSE_TIMEOUT_SEC: Final = 5.0


class CallChannel(PausedReading):
    """A data channel in place of a WebSocket (a SoleLink): passes its messages to a receiver.

    There are no pings: ICE itself checks every few seconds whether the peer is there (RFC 7675).
    """

    def __init__(
        self,
        peer: RTCPeerConnection,
        *,
        budget: ByteBudget,
        input_pace: Callable[[int], float] | None,
        write_timeout: float,
    ) -> None:
        """``budget`` is charged for waiting events, whether received or unsent. ``write_timeout`` is in seconds.

        ``input_pace`` is called with the bytes of each event and of each packet's speech, and returns for how many
        seconds to pause reading.
        """
        self._peer = peer
        self.loop = asyncio.get_running_loop()
        self._channel: RTCDataChannel | None = None
        self._pauses = Pause.EARLY
        #: Messages that wait, with whether each is text.
        self._unread: deque[tuple[bytes, bool]] = deque()
        self._unread_share = Share(budget)
        self._unsent_share = Share(budget)
        self._write_timeout = write_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        self._input_pace = input_pace
        #: Done when the channel is open, or the peer is gone.
        self.opened: asyncio.Future[bool] = self.loop.create_future()
        #: Set when no message waits to be sent, or none can be sent any more.
        self._sent = asyncio.Event()
        self.heard_at = self.loop.time()
        #: Whether input is no longer accepted, because the peer's messages have too many fragments.
        self._endless = False
        peer.on("datachannel", self._on_channel)
        peer.on("connectionstatechange", self._on_state)

    @property
    def is_open(self) -> bool:
        """Whether messages that are written now are sent."""
        return not self._endless and self._channel is not None and self._channel.readyState == "open"

    @property
    def paused(self) -> bool:
        """Whether writing should pause, as more than MAX_UNSENT_BYTES are unsent."""
        return self._channel is not None and self._channel.bufferedAmount > MAX_UNSENT_BYTES

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """Pass messages to ``receiver`` from now on, and charge ``account``, the byte budget of its session."""
        if account is not None:
            self._unread_share.move(account)
            self._unsent_share.move(account)
        self._receiver = receiver
        self.resume_reading(Pause.EARLY)
        if not self.is_open:
            receiver.connection_closing()

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole message without waiting. Does nothing unless the channel is open."""
        if self._channel is not None:
            with suppress(InvalidStateError):
                self._channel.send(data.decode() if is_text else data)
                self._sent.clear()
                self._count_unsent(self._channel)

    def _count_unsent(self, channel: RTCDataChannel) -> None:
        """Charge the unsent bytes, and pause reading while there are more than MAX_UNSENT_BYTES."""
        unsent = channel.bufferedAmount
        if unsent <= _LOW_WATER_BYTES:  # so little that the library does not report when it is sent
            return
        self._unsent_share.force(unsent)
        if unsent > MAX_UNSENT_BYTES:
            self.pause_reading(Pause.UNWRITTEN)
            if self._stall_timer is None:
                self._stall_timer = self.loop.call_later(self._write_timeout, self._check_stall, channel, unsent)

    def _check_stall(self, channel: RTCDataChannel, before: int) -> None:
        unsent = channel.bufferedAmount
        if before - unsent >= _LOW_WATER_BYTES:
            self._stall_timer = self.loop.call_later(self._write_timeout, self._check_stall, channel, unsent)
        else:
            self._refuse(SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds"))

    def _all_sent(self) -> None:
        self._unsent_share.force(0)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def write_ping(self) -> None:
        """Do nothing: see the class."""

    def heard(self, size: int) -> bool:
        """Count ``size`` bytes of media from the peer. Returns False if they must be dropped: reading is paused."""
        self.touch()
        if not self.held_to_pace:  # what is dropped does not count
            self._count(size)
        return self.is_reading

    # reading

    def _read_on(self) -> None:
        while self._unread and not self._pauses:
            data, is_text = self._unread.popleft()
            self._unread_share.resize(self._unread_share.size - len(data) - MESSAGE_OVERHEAD_BYTES)
            self._give(data, is_text)

    def bound_fragments(self) -> None:
        """Limit the fragments of incomplete messages on all SCTP streams; end the call at the limit.

        The library limits neither the fragments of one message nor those of all. Call this once the peer's offer is
        known.
        """
        sctp = self._peer.sctp
        if sctp is None:
            return
        take, come = sctp._receive_data_chunk, 0

        async def receive(chunk: DataChunk) -> None:
            nonlocal come
            if self._endless:
                return
            await take(chunk)
            come += 1
            if come % _FRAGMENTS_PER_LOOK == 0:
                waiting = [stream.reassembly for stream in sctp._inbound_streams.values() if stream.reassembly]
                if sum(map(len, waiting)) > MAX_FRAGMENTS or any(map(_too_long, waiting)):
                    self._end_input()

        sctp._receive_data_chunk = receive  # type: ignore[method-assign]

    def _end_input(self) -> None:
        self._endless = True
        if self._receiver is None:
            self._gone()
        else:
            self._refuse(PayloadTooLarge(f"a message has at most {MAX_MESSAGE_BYTES} bytes"))

    def _on_channel(self, channel: RTCDataChannel) -> None:
        if channel.label != LABEL or self._channel is not None:
            channel.close()
            return
        self._channel = channel
        channel.bufferedAmountLowThreshold = _LOW_WATER_BYTES
        channel.on("message", self._on_message)
        channel.on("bufferedamountlow", self._on_room)
        channel.on("close", self._gone)
        if not self.opened.done():
            self.opened.set_result(True)

    def _on_message(self, message: str | bytes) -> None:
        self.touch()
        data = message.encode() if isinstance(message, str) else message
        if len(data) > MAX_MESSAGE_BYTES:
            self._refuse(PayloadTooLarge(f"a message has at most {MAX_MESSAGE_BYTES} bytes"))
            return
        self._count(len(data))
        if not self._pauses and not self._unread:
            self._give(data, isinstance(message, str))
            return
        size = self._unread_share.size + len(data) + MESSAGE_OVERHEAD_BYTES
        try:
            if size > MAX_UNREAD_BYTES:
                raise EngineOverloaded("too many events wait for the session")
            self._unread_share.resize(size)
        except (EngineOverloaded, PayloadTooLarge) as error:
            self._refuse(error)
            return
        self._unread.append((data, isinstance(message, str)))

    def _give(self, data: bytes, is_text: bool) -> None:
        if self._receiver is not None:
            self._receiver.receive_message(data, is_text=is_text)

    def _count(self, size: int) -> None:
        if self._input_pace is not None and (seconds := self._input_pace(size)) and not self.held_to_pace:
            self._keep_pace(seconds)

    def _on_room(self) -> None:
        self._sent.set()
        self._all_sent()
        self.resume_reading(Pause.UNWRITTEN)
        if self._receiver is not None:
            self._receiver.resume_output()

    # the end

    @property
    def lost(self) -> bool:
        """Whether the peer vanished without closing, or never connected."""
        return self._channel is None or self._peer.connectionState == "failed"

    def _on_state(self) -> None:
        if self._peer.connectionState in ("failed", "closed"):
            self._gone()

    def _gone(self) -> None:
        self._sent.set()
        if not self.opened.done():
            self.opened.set_result(False)
        if self._receiver is not None:
            self._receiver.connection_closing()

    def fail(self, code: CloseCode, reason: str) -> None:
        """Do nothing: ICE reports when the peer is gone."""

    async def close_in_time(self, code: int, reason: str) -> None:
        """Send the unsent messages, then close the peer connection. ``code`` and ``reason`` cannot be sent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                if self._channel is not None and self.is_open and self._channel.bufferedAmount:
                    self._channel.bufferedAmountLowThreshold = 0
                    self._sent.clear()
                    await self._sent.wait()
        self._end_pace()
        self._all_sent()
        self._unread.clear()
        self._unread_share.resize(0)
        closing = asyncio.create_task(self._peer.close())
        try:
            while not (await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_SEC))[0]:
                self._give_up_relays()
            await closing
        finally:
            closing.cancel()

    def _give_up_relays(self) -> None:
        """Stop waiting for TURN servers to release their addresses. The addresses expire anyway."""
        transports = [transceiver.sender.transport for transceiver in self._peer.getTransceivers()]
        if self._peer.sctp is not None:
            transports.append(self._peer.sctp.transport)
        for protocol in {one for each in transports for one in each.transport._connection._protocols}:
            if isinstance(protocol.transport, TurnTransport) and (release := getattr(protocol.transport, _RELEASE)):
                release.cancel()


def _too_long(fragments: Sequence[DataChunk]) -> bool:
    """Return whether ``fragments`` contain a message longer than MAX_MESSAGE_BYTES, still incomplete."""
    size, expected = 0, None
    for fragment in fragments:
        size = size + len(fragment.user_data) if fragment.tsn == expected else len(fragment.user_data)
        if size > MAX_MESSAGE_BYTES:
            return True
        expected = None if fragment.flags & SCTP_DATA_LAST_FRAG else tsn_plus_one(fragment.tsn)
    return False


# The caller's speech.

#: Seconds of a gap that are concealed. After that, libopus has faded out the audio before the gap.
CONCEALED_SEC: Final = 0.1
#: A longer gap is not filled: the caller's clock has jumped.
MAX_GAP_SEC: Final = 10.0
#: Seconds by which received audio may be ahead of the clock: the longest gap, and audio that was delayed on its way.
MAX_AHEAD_SEC: Final = 12.0
#: The longest packet of Opus (RFC 6716, section 3.2.5).
_MAX_PACKET_SEC: Final = 0.12


class CallMicrophone:
    """The receiving track of a call: orders packets, decodes them, fills gaps, and calls ``hear`` with pcm16.

    The sample rate is SAMPLE_RATE. Everything runs on the event loop: to decode a packet of 20 ms takes 0.04 ms.
    Packets that would put the received audio more than ``MAX_AHEAD_SEC`` ahead of the clock are dropped before they are
    decoded, so that no call takes more than its share of the loop.
    """

    def __init__(self, hear: Callable[[bytes], None], metrics: Metrics) -> None:
        self._hear = hear
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._buffer = JitterBuffer()
        self._decoder = OpusPacketDecoder()
        #: The RTP timestamp that follows the decoded audio; None before the first packet.
        self._expected: int | None = None
        #: Seconds by which the audio was ahead of the clock, and the time at which that was so.
        self._ahead = 0.0
        self._ahead_at = self._loop.time()
        #: Whether packets after the decoded audio were lost.
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def connect(self, receiver: RTCRtpReceiver) -> None:
        """Put this object in place of the jitter buffer of ``receiver``, and end the receiver's decoder thread."""
        setattr(receiver, _BUFFER, self)
        getattr(receiver, _DECODER_QUEUE).put(None)

    def add(self, packet: Any) -> tuple[bool, None]:
        """Receive a packet of the track: aiortc calls this as its jitter buffer. Returns (False, None): no frame."""
        if not self._closed:
            now = self._loop.time()
            # A packet of padding alone, with which senders measure the network, has a number like all others.
            passed = self._buffer.receive(
                packet.sequence_number, packet.timestamp, bytes(packet.payload), now=now, source=packet.ssrc
            )
            self._pass_on(passed)
            self._arm()
        return False, None

    def close(self) -> None:
        self._closed = True
        self._disarm()

    def _arm(self) -> None:
        self._disarm()
        if (due := self._buffer.get_timer()) is not None:
            self._timer = self._loop.call_at(due, self._on_timer, due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, due: float) -> None:
        self._timer = None
        self._pass_on(self._buffer.pass_over(max(self._loop.time(), due)))  # a timer may fire a little early
        if not self._closed:
            self._arm()

    def _pass_on(self, packets: Iterable[MediaPacket]) -> None:
        counts = self._buffer.take_counts()
        for packet in packets:
            if packet.begins and self._expected is not None:
                self._decoder, self._expected, self._lost = OpusPacketDecoder(), None, False
            self._lost = self._lost or packet.lost > 0
            if not packet.payload:
                continue
            gap = self._gap(packet)
            try:
                if not self._keeps_pace(gap / CLOCK_RATE):
                    raise InvalidFrame("the audio of a call comes faster than it is spoken")
                audio = self._fill(gap) + self._decoder.decode(packet.payload)
            except InvalidFrame:
                counts[PacketOutcome.DROPPED] = counts.get(PacketOutcome.DROPPED, 0) + 1
                continue
            self._ahead += self._decoder.seconds + gap / CLOCK_RATE
            self._lost = False
            self._expected = (packet.timestamp + round(self._decoder.seconds * CLOCK_RATE)) % (1 << 32)
            if not self._closed:
                self._hear(audio)
        for outcome, number in counts.items():
            self._metrics.webrtc_packets.labels(outcome.value).inc(number)

    def _keeps_pace(self, gap_sec: float) -> bool:
        """Return whether a gap of ``gap_sec`` and another packet stay within MAX_AHEAD_SEC."""
        now = self._loop.time()
        self._ahead = max(0.0, self._ahead - (now - self._ahead_at))
        self._ahead_at = now
        return self._ahead + gap_sec + _MAX_PACKET_SEC <= MAX_AHEAD_SEC

    def _gap(self, packet: MediaPacket) -> int:
        """Return the ticks between the audio decoded so far and ``packet``; 0 if the gap is not to be filled."""
        if self._expected is None:
            return 0
        ticks = (packet.timestamp - self._expected) % (1 << 32)
        return 0 if ticks > MAX_GAP_SEC * CLOCK_RATE else ticks  # or it overlaps with what was decoded

    def _fill(self, ticks: int) -> bytes:
        """Return audio for a gap of ``ticks``: concealment if packets were lost, silence if the sender paused."""
        size = 2 * (ticks * SAMPLE_RATE // CLOCK_RATE)
        filled = bytearray()
        if self._lost:
            self._metrics.webrtc_concealed_seconds.inc(ticks / CLOCK_RATE)
            wanted = min(size, int(2 * SAMPLE_RATE * CONCEALED_SEC))
            while len(filled) < wanted and (made := self._decoder.conceal()):
                filled += made
        return bytes(filled[:size].ljust(size, b"\0"))


# What the caller hears.

PACKET_SEC: Final = 0.02
#: If the track is this far behind the clock, it goes on from now, instead of catching up.
MAX_LATE_SEC: Final = 0.1
#: Seconds of audio sent at once after a pause, ahead of the clock: a player waits for more than one packet.
HEAD_START_SEC: Final = 2 * PACKET_SEC
#: How much longer than its audio the rest of an answer may take at the end of a call.
PLAYOUT_MARGIN_SEC: Final = 1.0


class CallSpeaker(MediaStreamTrack):
    """The sending track of a call: Opus packets of the answers, in real time. Between answers it sends nothing.

    ``on_started`` and ``on_stopped`` are called with the id of a response when its audio begins, and when all its audio
    has been sent.
    """

    kind = "audio"

    def __init__(
        self,
        on_started: Callable[[str], None],
        on_stopped: Callable[[str], None],
        on_sent: Callable[[str, bytes, float], None] | None = None,
    ) -> None:
        """``on_sent`` is called with each packet before the packet is encoded.

        Its arguments are the id of the response, the audio, and in how many seconds the packet is heard if the player
        begins an answer with its first packet, without delay.
        """
        super().__init__()
        self._on_sent = on_sent
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._now = asyncio.get_running_loop().time
        self._encoder = OpusPacketEncoder()
        self._playout = Playout(PACKET_BYTES, TRACK)
        self._changed = asyncio.Event()
        #: Set when all audio was sent, or is dropped.
        self._silent = asyncio.Event()
        self._due = self._origin = self._now()

    def say(self, response_id: str, audio: bytes) -> None:
        """Queue audio of a response (pcm16 at 24 kHz) after all audio queued before."""
        self._playout.say(response_id, audio)
        self._changed.set()

    def finish(self, response_id: str) -> None:
        """Note that no more audio of a response follows."""
        self._playout.finish(response_id)
        self._changed.set()

    def duck(self, lowered: bool) -> None:
        """Lower the volume of the audio sent from now on, or restore its full volume."""
        self._playout.duck(lowered)

    def clear(self) -> list[str]:
        """Drop all queued audio. Returns the ids of the responses that were partly sent before."""
        self._silent.set()
        return self._playout.clear()

    async def played(self) -> None:
        """Wait until the caller has heard all queued audio, for little longer than it lasts."""
        if self._playout.unplayed:
            self._silent.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._playout.waiting / TRACK.bytes_per_second + PLAYOUT_MARGIN_SEC):
                    await self._silent.wait()
            await asyncio.sleep(HEAD_START_SEC)

    def stop(self) -> None:
        self.clear()
        self._changed.set()
        super().stop()

    async def recv(self) -> Packet[Any]:
        """Wait until the next packet is due, and return it. Raises MediaStreamError at the end of the track."""
        while True:
            while not self._playout.ready and self.readyState == "live":
                self._changed.clear()
                await self._changed.wait()
            if self.readyState != "live":
                raise MediaStreamError
            now = self._now()
            if now < self._due:
                await asyncio.sleep(self._due - now)
            elif now - self._due > MAX_LATE_SEC:
                self._due = now - HEAD_START_SEC
            if (audio := self._take()) is None:  # it was cleared meanwhile
                continue
            packet = Packet(await run_work(Work.CALLS, self._encoder.encode, audio))
            packet.pts = round((self._due - self._origin) * CLOCK_RATE)
            packet.time_base = Fraction(1, CLOCK_RATE)
            self._due += PACKET_SEC
            return packet

    def _take(self) -> bytes | None:
        """Remove and return the next 20 ms of audio; None if no audio is queued."""
        while (played := self._playout.take()) is not None:
            if not played.audio:
                if played.position:
                    self._on_stopped(played.answer_id)
                continue
            if not played.position:
                self._on_started(played.answer_id)
            if self._on_sent is not None:
                self._on_sent(played.answer_id, played.audio, self._due + HEAD_START_SEC - self._now())
            return played.audio
        self._silent.set()
        return None


# LiveCall: a session of the Live API over WebRTC. Importing it loads aiortc, slowly.


_BY_TRACK: Final = "the audio of a call comes by its track: events cannot append any"
#: What a sideband may not send, and why.
_REFUSED_IN_LIVE: Final = {
    "session.input_audio.append": _BY_TRACK,
    "session.start": "the session has already started",
}
#: What only a sideband may send.
_FIXTURE: Final = "session.output_audio.fixture.play"
#: In place of a response id in the speaker: one id for all audio.
_VOICE: Final = "voice"


class LiveCall(Call, LiveConnection):
    """A call of the Live API.

    The data channel carries the events that the session's ``client.data_channel`` permits, and no audio. Sidebands get
    all events and the audio of both sides: the user's as it was before muting, and the answers' with its place on the
    time line.
    """

    def __init__(self, channel: CallChannel, session: Session, dialect: LiveDialect, metrics: Metrics) -> None:
        super().__init__(channel, session, dialect, metrics, refused=_REFUSED_IN_LIVE)
        self._permissions = DataChannel()
        self._check_kind = self._check_own

    def _blocks_output(self) -> bool:
        return False  # the track goes on while the page leaves events unread

    def start(self, fields: Mapping[str, Any]) -> None:
        """Start the session with the offer's object ``session``. Raises what ``LiveDialect.start`` raises."""
        self._live.start(fields)
        start = self._live.start_fields
        if start is not None and start.client is not None:
            self._permissions = start.client.data_channel

    def hang_up(self) -> None:
        self._live.end("close_requested")

    def connection_closing(self) -> None:
        self._live.end("connection_lost" if self._channel.lost else "remote_hangup")
        super().connection_closing()

    def _opened(self) -> None:
        super()._opened()
        if self._permissions.restricted:
            message = "This data channel has the event permissions of the session's client.data_channel."
            first = [*self._live.greeting(), {"type": "info", "code": "data_channel_permissions", "message": message}]
        else:
            first = self._live.greeting()
        for event in first:
            self._write(event)

    def _closing(self, code: int, reason: str) -> None:
        if code == CloseCode.NORMAL_CLOSURE:  # nobody has said why
            self._live.end("connection_lost")
        super()._closing(code, reason)

    def hear(self, audio: bytes) -> None:
        self.sidebands.write({"type": "session.input_audio.append", "audio": audio})
        super().hear(audio)

    def _check_own(self, kind: str) -> None:
        """Raise InvalidValue if the page may not send events of the type ``kind`` over the data channel."""
        if kind in _REFUSED_IN_LIVE:
            raise InvalidValue(_REFUSED_IN_LIVE[kind], param="type")
        if kind == _FIXTURE or not self._permissions.may_send(kind):
            raise InvalidValue(f"the data channel of this session may not send {kind[:64]}", param="type")

    def _send(self, events: Iterable[Event]) -> None:
        for event in events:
            if event["type"] not in MIRRORED_AUDIO:
                event = {"event_id": new_id("event_"), **event}
            self.sidebands.write(event)
            self._write(event)

    def _write(self, event: Event) -> None:
        if event["type"] == "session.output_audio.delta":
            self._say(event["delta"], event["end_ms"])
        elif self._connection.is_open and (event["type"] == "info" or self._permissions.may_get(event)):
            write_event(self._connection, event)

    def _say(self, audio: bytes, end_ms: int) -> None:
        """Play audio of an answer. Silence that ends in the past is dropped: it is the silence between answers."""
        if end_ms > self._live.now_ms or audio.count(0) < len(audio):
            self.speaker.say(_VOICE, audio)
            self.speaker.finish(_VOICE)  # so that a part of a packet does not wait for more
