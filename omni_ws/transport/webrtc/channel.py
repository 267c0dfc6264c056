"""CallChannel: the data channel of a call, in the place of a WebSocket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from aiortc import InvalidStateError, RTCDataChannel, RTCPeerConnection
from aiortc.rtcsctptransport import LOCAL_MAX_MESSAGE_SIZE, SCTP_DATA_LAST_FRAG, DataChunk, tsn_plus_one
from websockets.frames import CloseCode

from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineOverloaded, OmniError, PayloadTooLarge, SlowConsumer
from omni_ws.transport.native.connection import RESTS, FrameReceiver, Pause

#: The channel of OpenAI's clients.
LABEL: Final = "oai-events"
#: The longest message, which the answer to an offer announces as ``max-message-size``. The library does not hold a peer
#: to it.
MAX_MESSAGE_BYTES: Final = LOCAL_MAX_MESSAGE_SIZE
#: Fragments that may wait for the rest of their messages, or for those before them. The library searches them all for
#: each that comes.
MAX_FRAGMENTS: Final = 2048
#: How many come between two looks at how long the messages are that they belong to.
_FRAGMENTS_PER_LOOK: Final = 32
#: Unsent events from which on no more are written, and below which they are again.
MAX_UNSENT_BYTES: Final = 1 << 20
_LOW_WATER_BYTES: Final = MAX_UNSENT_BYTES // 4
#: Events that may wait while the session takes none: SCTP cannot be told to wait for a reader here.
MAX_UNREAD_BYTES: Final = 1 << 20
#: Of an event that waits, besides its text.
MESSAGE_OVERHEAD_BYTES: Final = 128
#: How long the last events may take to be sent, and the library to close.
CLOSE_TIMEOUT_SEC: Final = 5.0
#: Where aioice keeps the task in which a TURN server is asked to release an address. It asks a minute long.
_RELEASE: Final = "_TurnTransport__close_task"


class CallChannel:
    """Gives the messages of a data channel to its receiver, and closes the connection under it. See SoleLink.

    ICE itself asks every few seconds whether the peer is there (RFC 7675), so there is nothing to ping.
    """

    def __init__(
        self,
        peer: RTCPeerConnection,
        *,
        budget: ByteBudget,
        input_pace: Callable[[int], float] | None,
        write_timeout: float,
    ) -> None:
        """``budget`` is charged for events that wait, on their way in or out. ``write_timeout`` is in seconds."""
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._channel: RTCDataChannel | None = None
        self._receiver: FrameReceiver | None = None
        self._pauses = Pause.EARLY
        #: Messages that wait, with whether each is text.
        self._unread: deque[tuple[bytes, bool]] = deque()
        self._unread_share = Share(budget)
        self._unsent_share = Share(budget)
        self._write_timeout = write_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        self._input_pace = input_pace
        self._pace_timer: asyncio.TimerHandle | None = None
        #: Done when the channel is open, or the peer is gone.
        self.opened: asyncio.Future[bool] = self._loop.create_future()
        #: Set when nothing waits to be sent, or nothing can be.
        self._sent = asyncio.Event()
        self.heard_at = self._loop.time()
        #: Whether nothing more is taken: the peer does not end its messages.
        self._endless = False
        peer.on("datachannel", self._on_channel)
        peer.on("connectionstatechange", self._on_state)

    @property
    def is_open(self) -> bool:
        """Whether what is written now is sent."""
        return not self._endless and self._channel is not None and self._channel.readyState == "open"

    @property
    def is_reading(self) -> bool:
        """Whether the silence of the peer is its own."""
        return not self._pauses & ~Pause.TURN

    @property
    def held_to_pace(self) -> bool:
        """Whether the client sent more than its key allows."""
        return Pause.PACE in self._pauses

    @property
    def paused(self) -> bool:
        """Whether the peer has yet to take what was written."""
        return self._channel is not None and self._channel.bufferedAmount > MAX_UNSENT_BYTES

    def attach(self, receiver: FrameReceiver, account: ByteBudget | None = None) -> None:
        """From now on messages go to ``receiver``; ``account`` is that of its session, which is charged."""
        if account is not None:
            self._unread_share.move(account)
            self._unsent_share.move(account)
        self._receiver = receiver
        self.resume_reading(Pause.EARLY)
        if not self.is_open:
            receiver.connection_closing()

    def write_message(self, data: bytes, *, is_text: bool) -> None:
        """Send a whole message without waiting."""
        if self._channel is not None:
            with suppress(InvalidStateError):
                self._channel.send(data.decode() if is_text else data)
                self._sent.clear()
                self._count_unsent(self._channel)

    def _count_unsent(self, channel: RTCDataChannel) -> None:
        """Charge what waits to be sent, and do not read a peer that leaves too much of it."""
        unsent = channel.bufferedAmount
        if unsent <= _LOW_WATER_BYTES:  # below which nobody says when it is gone
            return
        self._unsent_share.force(unsent)
        if unsent > MAX_UNSENT_BYTES:
            self.pause_reading(Pause.UNWRITTEN)
            if self._stall_timer is None:
                self._stall_timer = self._loop.call_later(self._write_timeout, self._check_stall, channel, unsent)

    def _check_stall(self, channel: RTCDataChannel, before: int) -> None:
        unsent = channel.bufferedAmount
        if before - unsent >= _LOW_WATER_BYTES:
            self._stall_timer = self._loop.call_later(self._write_timeout, self._check_stall, channel, unsent)
        else:
            self._refuse(SlowConsumer(f"the client has not read for {self._write_timeout:g} seconds"))

    def _all_sent(self) -> None:
        self._unsent_share.force(0)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def end_pass(self) -> None:
        """What the last message asked for may have been much work: others have their turn before the next message."""
        self.pause_reading(Pause.TURN)
        self._loop.call_soon(self.resume_reading, Pause.TURN)

    def write_ping(self) -> None:
        """Nothing: see the class."""

    def touch(self) -> float:
        """Count the silence of the peer from now on. Returns the time."""
        self.heard_at = self._loop.time()
        return self.heard_at

    def heard(self, size: int) -> bool:
        """The peer has sent ``size`` bytes of media. Returns whether to take them: media cannot wait."""
        self.touch()
        if not self.held_to_pace:  # what is dropped does not count
            self._keep_pace(size)
        return self.is_reading

    # reading

    def pause_reading(self, reason: Pause) -> None:
        rested = self._pauses & RESTS
        self._pauses |= reason
        if reason & RESTS and not rested and self._receiver is not None:
            self._receiver.reading_changed()

    def resume_reading(self, reason: Pause) -> None:
        rested = self._pauses & RESTS
        self._pauses &= ~reason
        if rested and not self._pauses & RESTS and self._receiver is not None:
            self._receiver.reading_changed()
        while self._unread and not self._pauses:
            data, is_text = self._unread.popleft()
            self._unread_share.resize(self._unread_share.size - len(data) - MESSAGE_OVERHEAD_BYTES)
            self._give(data, is_text)

    def bound_fragments(self) -> None:
        """End the call where the fragments of a message become too many, whatever stream they are on.

        The library bounds neither one message nor all of them. To be called once the peer's offer is known.
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
        self._keep_pace(len(data))
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

    def _refuse(self, error: OmniError) -> None:
        if self._receiver is not None:
            self._receiver.input_refused(error)

    def _keep_pace(self, size: int) -> None:
        if self._input_pace is not None and (seconds := self._input_pace(size)) and not self.held_to_pace:
            self.pause_reading(Pause.PACE)
            self._pace_timer = self._loop.call_later(seconds, self._resume_pace)

    def _resume_pace(self) -> None:
        self._pace_timer = None
        self.resume_reading(Pause.PACE)

    def _on_room(self) -> None:
        self._sent.set()
        self._all_sent()
        self.resume_reading(Pause.UNWRITTEN)
        if self._receiver is not None:
            self._receiver.resume_output()

    # the end

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
        """Nothing: ICE says when the peer is gone."""

    async def close_in_time(self, code: int, reason: str) -> None:
        """Send what is left, then close and release everything. A data channel has no codes to close with."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_SEC):
                if self._channel is not None and self.is_open and self._channel.bufferedAmount:
                    self._channel.bufferedAmountLowThreshold = 0
                    self._sent.clear()
                    await self._sent.wait()
        if self._pace_timer is not None:
            self._pace_timer.cancel()
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
        """Wait no longer for TURN servers, which forget the addresses that they gave in time."""
        transports = [transceiver.sender.transport for transceiver in self._peer.getTransceivers()]
        if self._peer.sctp is not None:
            transports.append(self._peer.sctp.transport)
        for protocol in {one for each in transports for one in each.transport._connection._protocols}:
            if (release := getattr(protocol.transport, _RELEASE, None)) is not None:
                release.cancel()


def _too_long(fragments: Sequence[DataChunk]) -> bool:
    """Whether a message whose fragments wait is longer than any may be."""
    size, expected = 0, None
    for fragment in fragments:
        size = size + len(fragment.user_data) if fragment.tsn == expected else len(fragment.user_data)
        if size > MAX_MESSAGE_BYTES:
            return True
        expected = None if fragment.flags & SCTP_DATA_LAST_FRAG else tsn_plus_one(fragment.tsn)
    return False
