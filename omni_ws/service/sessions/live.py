"""LiveSession: a conversation that outlives its connections, for as long as its client may come back."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Protocol

from omni_ws.core.chunks import FinishReason
from omni_ws.errors import ORDERLY_ENDS, OmniError, ShuttingDown
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.outbox import Outbox
from omni_ws.service.conversation.owner import ConversationOwner
from omni_ws.service.recording.recorder import SessionRecording
from omni_ws.wire.server_frames import InputAckFrame, SessionClosingFrame, SessionResumedFrame


class Attachment(ConversationOwner, Protocol):
    """The connection that a session speaks through."""

    def replaced(self) -> None:
        """Another connection has taken over."""

    def session_over(self, error: OmniError | None) -> None:
        """The last messages are in the outbox: say them, and leave by ``detach``."""


class LiveSession:
    """Connections come by ``attach`` or ``resume`` and go by ``detach``; ``run`` lasts until the session is over.

    While no connection is there answers are still made, up to what the outbox holds, and no clock of the client runs
    but the one of ``grace`` (seconds; 0: a session ends with its connection).
    """

    def __init__(self, session_id: str, conversation: Conversation, outbox: Outbox, *, grace: float) -> None:
        self.session_id = session_id
        self.conversation = conversation
        self.outbox = outbox
        #: Set when the session must end: with the reason to tell the client, None where there is nobody to tell.
        self.ending: asyncio.Future[OmniError | None] = asyncio.get_running_loop().create_future()
        self.recording: SessionRecording | None = None
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._token = b""
        #: The token that the client came back with, until it is heard over the new connection.
        self.spent_soon: bytes | None = None
        self._attachment: Attachment | None = None
        self._detached = asyncio.Event()
        self._detached.set()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._drained_by: float | None = None
        self._announced_closing = False

    # tokens

    @property
    def resumable(self) -> bool:
        return self._grace > 0 and not self.ending.done()

    def new_token(self) -> str | None:
        """The token to come back with; None where there is no coming back."""
        if not self.resumable:
            return None
        token = secrets.token_urlsafe(24)
        self._token = _digest(token)
        return token

    def admits(self, token: str) -> bool:
        """Whether whoever presents this token may take the session over."""
        presented = _digest(token)
        current = hmac.compare_digest(presented, self._token)
        earlier = self.spent_soon is not None and hmac.compare_digest(presented, self.spent_soon)
        return self.resumable and (current or earlier)

    def spend(self, token: str) -> None:
        """Until its holder is heard over the new connection, it may be all that there is to come back with."""
        self.spent_soon = _digest(token)

    def heard(self) -> None:
        """The client has the token of its newest connection: no other is good for anything any more."""
        self.spent_soon = None

    # connections

    @property
    def away(self) -> bool:
        """Whether the client has no connection just now."""
        return self._attachment is None

    def attach(self, attachment: Attachment) -> None:
        """From here on the session speaks through this connection."""
        self._attachment = attachment
        self._detached.clear()
        self.conversation.attach(attachment)
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None

    def resume(self, attachment: Attachment, last_output: int) -> tuple[SessionResumedFrame, InputAckFrame]:
        """Go on over another connection, whose client has heard the outputs up to this one; see ``can_resume``.

        Returns what is to be said over it before anything else.
        """
        self.release()
        conversation = self.conversation
        replayed = self.outbox.rewind(last_output)
        conversation.stream.unheard(now=self._loop.time())
        token = self.new_token()
        assert token is not None
        self.attach(attachment)
        if self._drained_by is not None:
            self._announce_drain()
        if self._answered_all:
            self._loop.call_soon(self.end, ShuttingDown("the server is shutting down"))
        ack = conversation.take_ack()
        resumed = SessionResumedFrame(
            session_id=self.session_id,
            resume_token=token,
            next_sequence_id=ack.next_sequence_id,
            replayed=replayed,
        )
        return resumed, ack

    def can_resume(self, last_output: int) -> bool:
        return self.outbox.can_rewind(last_output)

    def release(self) -> None:
        """Let go of the connection that is there, which another one replaces."""
        attachment = self._attachment
        if attachment is not None:
            self._unhook()
            attachment.replaced()

    def _unhook(self) -> None:
        self._attachment = None
        self._announced_closing = False
        self._detached.set()
        self.conversation.detach()

    def detach(self, attachment: Attachment) -> None:
        """A connection is gone. Where it is the session's, the client has its grace to come back."""
        if self._attachment is not attachment:
            return
        self._unhook()
        if not self.resumable:
            self.end(None)
            return
        self.outbox.drop_of_the_moment()
        self._grace_timer = self._loop.call_later(self._grace, self.end, None)
        self._end_if_forgotten()

    # life

    async def run(self) -> None:
        """Until the session is over, and its last connection gone."""
        answers = asyncio.create_task(self.conversation.run(), name=f"conversation {self.session_id}")
        answers.add_done_callback(self._answers_ended)
        try:
            error = await self.ending
            await self._stop(answers)
            if self._attachment is not None:
                self._attachment.session_over(error)
                await self._detached.wait()
        finally:
            await self._stop(answers)
            self.outbox.close()
            self.conversation.observed.ended()

    async def _stop(self, answers: asyncio.Task[None]) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        answers.cancel()
        await asyncio.gather(answers, return_exceptions=True)
        self.conversation.end()

    def end(self, error: OmniError | None) -> None:
        """End the session for this reason, at the next opportunity; None where there is nobody to tell it to."""
        if self.ending.done():
            return
        self.ending.set_result(error)
        if error is not None and not isinstance(error, ORDERLY_ENDS):
            # Before the finals of the requests that end with the session.
            self.conversation.finish_reason_at_end = FinishReason.ERROR
            self.outbox.put_nowait(error)

    def drain(self, time_left: float) -> None:
        """The server is going: requests that are open get their answers, then the session ends.

        A client that is away is waited for while there is something to tell it, and it has time to come back.
        """
        if self.ending.done():
            return
        self._drained_by = self._loop.time() + time_left
        if self._attachment is not None:
            self._announce_drain()
        self.conversation.drain()
        self.conversation.close()

    def announce_closing(self, error: OmniError, time_left: float) -> None:
        """Say once that the session is about to be closed in good order."""
        if not self._announced_closing:
            self._announced_closing = True
            self.outbox.put_nowait(
                SessionClosingFrame(
                    reason=error.code, retryable=error.wire.retryable, time_left_ms=round(time_left * 1000)
                )
            )

    def _announce_drain(self) -> None:
        assert self._drained_by is not None
        time_left = max(0, self._drained_by - self._loop.time()) if self.conversation.busy else 0
        self.announce_closing(ShuttingDown("the server is shutting down"), time_left)

    def _answers_ended(self, answers: asyncio.Task[None]) -> None:
        if answers.cancelled() or self.ending.done():
            return
        failure = answers.exception()
        assert failure is None or isinstance(failure, OmniError)
        if failure is not None:
            self.ending.set_result(failure)  # which the client has been told
        elif self._attachment is not None:
            self.ending.set_result(ShuttingDown("the server is shutting down"))
        else:
            self._end_if_forgotten()

    @property
    def _answered_all(self) -> bool:
        return self.conversation.closing and not self.conversation.busy

    def _end_if_forgotten(self) -> None:
        """All is answered, and nothing is left to say to a client that is away."""
        if self._answered_all and not self.outbox:
            self.end(None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
