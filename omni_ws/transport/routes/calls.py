"""Routes of recorded calls: the list, and for each call its page, ``call.json``, its audio, and a zip of all.

They are for operators, as profiling is. Only the server's own pages may use them, whatever ``--allow-origin`` says. The
client whose key opened a Live session with ``store: true`` can read the recording of that session, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import orjson

from omni_ws.calls.files import describe, summary, transcript, write_wav, write_zip
from omni_ws.calls.forking import ANSWER_RATE, SPOKEN_RATE, ForkPoint, can_fork, fork_point
from omni_ws.calls.lines import CallFolder, CallLines
from omni_ws.calls.reading import CallReading, glance
from omni_ws.config.keys import key_name
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinalChunk,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
)
from omni_ws.engine.threads import SoleThread, Work, run_work
from omni_ws.errors import (
    EngineOverloaded,
    InvalidValue,
    NotFound,
    OmniError,
    OriginNotAllowed,
    RateLimited,
    SessionNotFound,
    UnsupportedParameter,
)
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import (
    check_history,
    give_history,
)
from omni_ws.service.conversation.output_log import ServerMessage
from omni_ws.service.recording import ConnectionRecording
from omni_ws.transport.http.access import is_allowed_origin
from omni_ws.transport.http.application import Application, FrontEnd, Router
from omni_ws.transport.http.exchange import HttpExchange, read_json_object
from omni_ws.transport.http.request import HttpRequest
from omni_ws.transport.native.endpoint import record_message
from omni_ws.transport.realtime.live import LIVE_PATH, session_of
from omni_ws.transport.routes.generation import GenerationRoutes
from omni_ws.transport.routes.operations import check_operator, send_page_file
from omni_ws.transport.routes.sole_request import SoleRequest, next_message
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_requests import FIELD

#: How long an answer may take after the end of the user's turn.
ANSWER_SEC: Final = 120.0
#: The longest instructions, and the longest name of a voice.
MAX_INSTRUCTIONS: Final = 32_000
MAX_VOICE: Final = 256
#: The largest body of a request, in bytes.
MAX_BODY_BYTES: Final = 256 * 1024
_FIELDS: Final = frozenset({"turn", "instructions", "voice"})
_PIECE_SEC: Final = 0.1
_PIECE_BYTES: Final = int(SPOKEN_RATE * _PIECE_SEC) * 2
_SPOKEN: Final = AudioFormat(AudioEncoding.PCM16, SPOKEN_RATE)
_ANSWERED: Final = AudioFormat(AudioEncoding.PCM16, ANSWER_RATE)
_RETRY_MS: Final = 5000
#: How long the recording may take to be written, and the interval of checks for that.
_WRITE_SEC: Final = 10.0
_LOOK_SEC: Final = 0.02


def read_fork(body: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    """Read the turn at which to fork a call, and the settings to change. Raises an InvalidRequest naming the field."""
    turn = body.get("turn")
    if not isinstance(turn, int) or isinstance(turn, bool):
        raise InvalidValue("turn must be the number of a turn, from 1", param="turn")
    for name in sorted(body.keys() - _FIELDS):
        hint = "; `omni-ws replay --from-turn` asks another model" if name in ("llm", "model") else ""
        raise UnsupportedParameter(f"a fork here takes turn, instructions and voice{hint}", param=name[:64])
    changes = {}
    for name, most in (("instructions", MAX_INSTRUCTIONS), ("voice", MAX_VOICE)):
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, str) or len(value) > most:
            raise InvalidValue(f"{name} must be a text of at most {most} characters", param=name)
        changes[name] = value
    return turn, changes


class CallForks(GenerationRoutes):
    """Plays forks of recorded calls, one at a time. A fork repeats a turn with another voice or other instructions.

    The server feeds the user's recorded turn to a conversation without a socket, at the pace at which it was spoken.
    The new call is recorded as if media tracks had carried the audio of both sides.
    """

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._is_busy = False

    @property
    def voices(self) -> list[str]:
        """The voices from which a fork may choose."""
        return list(self._sessions.engine.capabilities.voices)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other forks out while the block runs. Raises RateLimited if another fork is being played."""
        if self._is_busy:
            raise RateLimited("another fork is being played; try again when it is over", retry_after_ms=_RETRY_MS)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def play(self, exchange: HttpExchange, point: ForkPoint, *, owner: str | None) -> str:
        """Feed the user's turn to a new conversation, and return the id of its recording once the answer is complete.

        Raises what opening a session raises, the error that ended the answer, and EngineOverloaded if the answer takes
        too long or cannot be recorded.
        """
        session, _ = self.open_session(
            exchange,
            ConfigurationPatch(point.config, sent=frozenset(point.config)),
            owner=owner,
            samples=False,
            streaming_input=True,
            prepare=partial(_remember, point=point),
        )
        call_id = session.conversation.observed.identity.session_id
        recording = self._recorder and self._recorder.begin("websocket", key=owner, name=call_id, asked_for=True)
        if not recording:
            session.conversation.end()
            session.conversation.observed.ended()
            raise EngineOverloaded("the fork cannot be recorded now")
        written = recording.connection()
        written.opened(exchange.request.path, subprotocol=None, last_output=None)
        told = {"type": "session_config", **point.config, FIELD: point.history}
        written.received(orjson.dumps(told), is_text=True)
        spoken_sec = len(point.sound) / (2 * SPOKEN_RATE)
        try:
            async with asyncio.timeout(spoken_sec + ANSWER_SEC), session.running(partial(_say, point, written)):
                while not isinstance(message := await next_message(session), FinalChunk):
                    _record(written, message)
                record_message(recording, message)
        except TimeoutError:
            raise EngineOverloaded(f"there is no whole answer {ANSWER_SEC:g} s after the turn") from None
        except OmniError as error:
            record_message(recording, error)
            raise
        finally:
            recording.end()  # the connection is not closed: that would end what is played
        with suppress(TimeoutError):  # what is not written yet will be
            async with asyncio.timeout(_WRITE_SEC):
                while not recording.file.is_over:  # noqa: ASYNC110  a thread writes it
                    await asyncio.sleep(_LOOK_SEC)
        return call_id


def _remember(conversation: Conversation, point: ForkPoint) -> None:
    give_history(conversation, check_history(conversation, point.history))


async def _say(point: ForkPoint, written: ConnectionRecording, session: SoleRequest) -> None:
    """Feed the user's turn: its text immediately, its audio at the pace at which it was spoken."""
    if point.text:
        frame = {"type": "input_chunk", "sequence_id": 0, "modality": "text", "text": point.text}
        written.received(orjson.dumps(frame), is_text=True)
        await session.feed(InputChunk(Modality.TEXT, point.text.encode()))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for start in range(0, len(point.sound), _PIECE_BYTES):
        piece = point.sound[start : start + _PIECE_BYTES]
        await asyncio.sleep(begun + (start + len(piece)) / (2 * SPOKEN_RATE) - loop.time())
        written.recording.sound(piece, _SPOKEN, by_user=True)
        await session.feed(InputChunk(Modality.AUDIO, piece))
    session.end_input()


def _record(written: ConnectionRecording, message: ServerMessage) -> None:
    record_message(written.recording, message)
    if isinstance(message, OutputChunk) and message.modality is OutputModality.AUDIO and message.payload:
        source = message.format or _ANSWERED
        written.recording.sound(message.payload, source, by_user=False, request_id=message.request_id)


CALLS_PATH: Final = "/calls"
CONTENT_PATH: Final = f"{LIVE_PATH}/{{session_id}}/content"
#: Calls of one list: the newest.
MAX_LISTED: Final = 500
#: Sounds that are kept after they were made, since players ask for their parts one by one; and for how long.
KEPT_SOUNDS: Final = 2
KEPT_SEC: Final = 120.0
T = TypeVar("T")
_PART_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
#: Header fields of every response: no browser guesses its type, no page of another site gets it, and no cache keeps it.
_HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; sandbox"),
    ("Cache-Control", "no-store"),
)


@dataclass(slots=True)
class _File:
    """A temporary file without a name. It is closed when it is not kept and has no readers."""

    file: BinaryIO
    size: int
    _users: int = 0
    _kept: bool = False

    @contextmanager
    def used(self, *, kept: bool = False) -> Iterator[BinaryIO]:
        """Keep the file open during the block; if ``kept`` is true, until ``drop`` is called."""
        self._users += 1
        self._kept = self._kept or kept
        try:
            yield self.file
        finally:
            self._users -= 1
            self._close()

    def drop(self) -> None:
        """Keep the file only as long as it has readers."""
        self._kept = False
        self._close()

    def _close(self) -> None:
        if not self._kept and not self._users:
            self.file.close()

    def __del__(self) -> None:
        self.file.close()


class CallRoutes(FrontEnd):
    """The handlers of ``/calls`` and of ``/v1/live/sessions/{id}/content``. Each worker serves the calls of all."""

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        record = self._config.record
        self._folder = None if record is None else CallFolder(record)
        self._forks = CallForks(app)
        #: Reading a long call takes seconds. One call is read at a time, even if the client that asked for it is gone.
        self._thread = SoleThread("recordings")
        #: The files with audio, by the recording and its size; the one that was requested last is at the end.
        self._sounds: OrderedDict[tuple[Path, int], _File] = OrderedDict()
        #: Held while a sound is made, so that none is made twice.
        self._making = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    def register(self, router: Router) -> None:
        router.add("GET", CALLS_PATH, self.list)
        router.add("GET", f"{CALLS_PATH}/{{id}}", self.page)
        router.add("GET", f"{CALLS_PATH}/{{id}}/call.json", self.describe)
        router.add("GET", f"{CALLS_PATH}/{{id}}/sound.wav", self.sound)
        router.add("GET", f"{CALLS_PATH}/{{id}}/call.zip", self.zip)
        router.add("POST", f"{CALLS_PATH}/{{id}}/fork", self.fork)
        router.add("GET", CONTENT_PATH, self.content)

    async def wait_closed(self) -> None:
        await super().wait_closed()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._forget_sounds()

    # operators

    async def list(self, exchange: HttpExchange) -> None:
        """Respond with the newest calls as JSON; to a browser, with the page that lists them."""
        if _wants_page(exchange.request):
            self._recorded()
            await send_page_file(exchange, "browser/calls/calls.html")
            return
        folder = self._open(exchange)
        found = await run_work(Work.FILES, _listed, folder)
        await _respond_json(exchange, {"calls": found})

    async def page(self, exchange: HttpExchange) -> None:
        """Respond with the page of a call. It holds no data of the call: it requests them with the user's key."""
        self._recorded()
        await send_page_file(exchange, "browser/calls/call.html")

    async def describe(self, exchange: HttpExchange) -> None:
        """Respond with ``call.json``: everything about a call except its audio."""
        lines = await self._find(exchange)
        await _respond_json(exchange, await self._read(lambda: self._described(CallReading(lines))))

    async def sound(self, exchange: HttpExchange) -> None:
        """Respond with the audio as a stereo WAV file, or with the requested range of it."""
        lines = await self._find(exchange)
        async with self._sound(lines) as sound:
            await _respond_file(exchange, sound, "audio/wav", tag=f'"{lines.size:x}"')

    async def zip(self, exchange: HttpExchange) -> None:
        """Respond with all of a call as a zip file."""
        lines = await self._find(exchange)
        name = f'attachment; filename="{exchange.path_parameters["id"]}.zip"'
        async with self._sound(lines) if lines.header.payloads else nullcontext() as sound:

            def write(target: BinaryIO) -> None:
                reading = CallReading(lines)
                write_zip(reading, self._described(reading), None if sound is None else sound.file, target)

            packed = await self._made(write)
        with packed.used():
            await _respond_file(exchange, packed, "application/zip", extra=[("Content-Disposition", name)])

    async def fork(self, exchange: HttpExchange) -> None:
        """Repeat a user turn of a recorded call with another voice or other instructions.

        Responds with the id of the new call once its answer is complete. Raises RateLimited while another fork is
        played.
        """
        lines = await self._find(exchange)
        with self._forks.alone():
            async with self._forks.admitted(exchange) as owner:
                body, _ = await read_json_object(exchange, MAX_BODY_BYTES)
                turn, changes = read_fork(body)
                point = await self._read(lambda: fork_point(CallReading(lines), turn, changes))
                call_id = await self._forks.play(exchange, point, owner=owner)
        await _respond_json(exchange, {"id": call_id})

    def _described(self, reading: CallReading) -> dict[str, Any]:
        """Return the content of ``call.json``, with the choices for a fork of the call."""
        forks = {"can_fork": can_fork(reading.header), "fork_choices": {"voice": self._forks.voices}}
        return describe(reading) | forks

    # the clients of the Live API

    async def content(self, exchange: HttpExchange) -> None:
        """Respond with the audio of a stored Live session, or with its transcript if the client accepts JSON.

        Raises Unauthenticated, UnsupportedParameter if the server records nothing, and SessionNotFound if the key has
        no such session, or did not ask for it to be stored.
        """
        key = self._authenticator.authenticate(exchange.request)
        if self._folder is None:
            raise UnsupportedParameter("content is not offered here: nothing is recorded (--record)", param="content")
        given = exchange.path_parameters["session_id"]
        lines = await run_work(Work.FILES, self._folder.find, session_of(given))
        if lines is None or lines.header.key != key_name(key) or lines.header.kind not in ("live", "webrtc"):
            raise SessionNotFound("there is no such session", param="session_id")
        if not await self._read(lines.was_stored):
            raise SessionNotFound("this session was not stored: store was not true", param="session_id")
        if _accepts(exchange.request, "application/json"):
            said = await self._read(lambda: transcript(describe(CallReading(lines))))
            await _respond_json(exchange, {"id": given, "object": "live.session.content", "transcript": said})
            return
        async with self._sound(lines) as sound:
            await _respond_file(exchange, sound, "audio/wav", tag=f'"{lines.size:x}"')

    # access

    def _recorded(self) -> CallFolder:
        if self._folder is None:
            raise NotFound("calls are not recorded here; record them with --record DIR (docs/recording.md)")
        return self._folder

    def _open(self, exchange: HttpExchange) -> CallFolder:
        """Check that the client may read recordings. Raises OriginNotAllowed, Unauthenticated and NotFound."""
        exchange.allow_origin(False)  # no response has CORS fields
        request = exchange.request
        if not is_allowed_origin(request, ()) or request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise OriginNotAllowed("no page but the server's own can read recorded calls")
        check_operator(self._authenticator, request, "recorded calls")
        return self._recorded()

    async def _find(self, exchange: HttpExchange) -> CallLines:
        folder = self._open(exchange)
        lines = await run_work(Work.FILES, folder.find, exchange.path_parameters["id"])
        if lines is None:
            raise NotFound("there is no recorded call with this id")
        return lines

    # files

    async def _read(self, read: Callable[[], T]) -> T:
        """Read a recording in this object's own thread. Raises NotFound if the recording is removed meanwhile."""
        return await _result(self._thread.submit(read))

    @asynccontextmanager
    async def _sound(self, lines: CallLines) -> AsyncIterator[_File]:
        """Yield the file with the audio of a call, made now or before. Raises NotFound if no audio was recorded."""
        if not lines.header.payloads:
            raise NotFound("this call was recorded without sound (record_payloads = false)")
        place = (lines.path, lines.size)
        if place not in self._sounds:  # else it does not wait for one that is made
            async with self._making:
                if place not in self._sounds:
                    self._sounds[place] = await self._made(lambda target: write_wav(CallReading(lines), target))
        found = self._sounds[place]
        self._sounds.move_to_end(place)
        with found.used(kept=True):
            while len(self._sounds) > KEPT_SOUNDS:
                self._sounds.popitem(last=False)[1].drop()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(KEPT_SEC, self._forget_sounds)
            yield found

    async def _made(self, write: Callable[[BinaryIO], object]) -> _File:
        """Let ``write`` fill a new temporary file in the folder of recordings. Raises EngineOverloaded."""
        folder = self._recorded().path

        def make() -> _File:
            # Without a name it vanishes with the last reader, and with the server.
            file = cast("BinaryIO", tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
            try:
                write(file)
                file.flush()
                return _File(file, file.seek(0, os.SEEK_END))
            except BaseException:
                file.close()
                raise

        made = self._thread.submit(make)
        try:
            return await _result(made)
        except asyncio.CancelledError:
            made.add_done_callback(_drop_made)  # the thread goes on, for nobody
            raise
        except OSError as error:
            raise EngineOverloaded(f"the sound of the call cannot be written: {error.strerror}") from None

    def _forget_sounds(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sound in self._sounds.values():
            sound.drop()
        self._sounds.clear()


async def _result(work: Future[T]) -> T:
    """Return the result of reading a recording. Raises NotFound if the recording was removed meanwhile."""
    try:
        return await asyncio.wrap_future(work)
    except FileNotFoundError:
        raise NotFound("there is no recorded call with this id") from None


def _drop_made(made: Future[_File]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().drop()


def _listed(folder: CallFolder) -> list[dict[str, Any]]:
    return [summary(lines) | glance(lines.path, lines.size)._asdict() for lines in folder.newest(MAX_LISTED)]


def _accepts(request: HttpRequest, media_type: str) -> bool:
    accepted = (part.partition(";")[0].strip().lower() for part in request.headers.tokens("accept"))
    return media_type in accepted


def _wants_page(request: HttpRequest) -> bool:
    return _accepts(request, "text/html")


async def _respond_json(exchange: HttpExchange, content: Any) -> None:
    """Respond with JSON, which is encoded off the event loop."""
    body = await run_work(Work.BODIES, orjson.dumps, content)
    await exchange.respond(200, [("Content-Type", "application/json"), *_HEADERS], body)


async def _respond_file(
    exchange: HttpExchange,
    found: _File,
    media_type: str,
    *,
    tag: str | None = None,
    extra: list[tuple[str, str]] | None = None,
) -> None:
    """Respond with a file, or with the requested range of it (RFC 9110, section 14)."""
    headers = [("Content-Type", media_type), *_HEADERS, ("Accept-Ranges", "bytes"), *(extra or ())]
    if tag is not None:
        headers.append(("ETag", tag))
    first, last, status = 0, found.size - 1, 200
    if (part := _part(exchange.request, found.size, tag)) is not None:
        first, last = part
        status = 206
        if first > last:
            await exchange.respond(416, [*headers, ("Content-Range", f"bytes */{found.size}")])
            return
        headers.append(("Content-Range", f"bytes {first}-{last}/{found.size}"))
    await exchange.start(status, [*headers, ("Content-Length", str(last + 1 - first))])
    if exchange.request.method == "HEAD":
        return
    while first <= last:
        data = await run_work(Work.FILES, os.pread, found.file.fileno(), min(_PART_BYTES, last + 1 - first), first)
        await exchange.write(data)
        first += len(data)


def _part(request: HttpRequest, size: int, tag: str | None) -> tuple[int, int] | None:
    """Return the first and the last byte of the requested range; None for the whole file.

    The first is larger than the last if the range is outside of the file. A request for several ranges, or for a range
    of an older version of the file, gets the whole file. ``tag`` is the version of the file. Raises InvalidValue for a
    range that ends before it begins.
    """
    if request.method != "GET" or (wanted := request.headers.get("range")) is None:
        return None
    if (known := request.headers.get("if-range")) is not None and known != tag:
        return None
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or not any(found.groups()) or max(map(len, found.groups())) > len(str(2**63)):
        return None
    begin, end = found.groups()
    if not begin:
        count = int(end)
        return (max(0, size - count), size - 1) if count else (size, size - 1)
    first = int(begin)
    last = min(int(end), size - 1) if end else size - 1
    if end and int(end) < first:
        raise InvalidValue("a range must not end before it begins", param="Range")
    return (first, last) if first < size else (size, size - 1)
