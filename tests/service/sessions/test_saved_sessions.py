"""A session is one value: written at any moment and restored in another server, it goes on as if nothing had happened.

A client does random things. In one run its server stays; in another the session is saved at random moments, also in the
middle of answers, behind gaps and while the client does not read, and goes on elsewhere. Its client comes back with the
last output that it has, and sends again what is not known to have arrived. Both runs give it the same messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.scripted_engines import HearingEngine, PlayingEngine, ReinedEngine, Reins

from omni_ws.audio import speech_watch
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import EngineName, ServerConfig
from omni_ws.core.chunks import (
    AnswerWarning,
    AnyOutput,
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    StartTrigger,
    ToolCallFragment,
    UrlCitation,
    Usage,
    Word,
)
from omni_ws.core.ledger import Ledger
from omni_ws.core.quota import ByteBudget
from omni_ws.engine.base import (
    AudioOutput,
    Engine,
    Finished,
    GenerationRequest,
    TextOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.errors import EngineFailed, InvalidValue, OmniError, SessionConflict, SessionNotFound, ShuttingDown
from omni_ws.service.conversation.output_log import (
    OF_THE_MOMENT,
    Attachment,
    RequestWarning,
    SavedMessage,
    ServerMessage,
)
from omni_ws.service.conversation.request import RequestState
from omni_ws.service.conversation.unasked import Telling
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session, Sessions
from omni_ws.wire.server_frames import (
    HistoryTruncatedFrame,
    ResponseStartedFrame,
    SessionUpdatedFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]

GOING = ShuttingDown("the server is shutting down")
#: Passes of the event loop after which nothing is left to be done.
SETTLED = 80
STEPS = 60


class Client(Attachment):
    """Takes messages while it reads."""

    def __init__(self) -> None:
        self.received: list[ServerMessage] = []
        self.reads = True
        self.session: Session

    def come(self, session: Session) -> None:
        self.session = session

    def write_now(self, output: OutputChunk) -> bool:
        if self.reads:
            self.received.append(output)
        return self.reads

    def output_ready(self) -> None:
        while self.reads and (message := self.session.outbox.take()) is not None:
            self.received.append(message)

    def session_over(self, error: OmniError | None) -> None:
        self.session.detach(self)

    @property
    def last_output(self) -> int:
        return max((one.sequence_id for one in self.received if isinstance(one, AnyOutput)), default=-1)

    def lose(self, last_output: int) -> None:
        """What came behind this output did not arrive."""
        while self.received and not (isinstance(self.received[-1], AnyOutput) and self.last_output <= last_output):
            self.received.pop()


class Server:
    def __init__(self, reins: Reins, speech_workers: InlineWorkers | None = None, engine: Engine | None = None) -> None:
        self.engine = engine or ReinedEngine(reins)
        config = ServerConfig(engine=EngineName.FAKE)
        self.factory = SessionFactory(self.engine, config, speech_workers=speech_workers)
        self.sessions = Sessions(self.factory, origin="websocket", grace=30, survive=True)

    async def stop(self) -> None:
        self.sessions.end_all(GOING)
        await self.sessions.wait_closed()
        self.factory.speech_workers.close()
        await self.engine.stop()
        assert self.factory.budget.held == 0


class Wandering:
    """A client that does the same with the same ``seed``, whether its session ``moves`` or not."""

    def __init__(self, seed: int, *, moves: bool, news: bool) -> None:
        self._rng = random.Random(seed)
        #: For what must not change what the client does.
        self._fate = random.Random(seed)
        #: For when something is given to be told, by the side of the steps.
        self._news = random.Random(seed) if news else None
        self._moves = moves
        self.moved = 0
        self.story: list[str] = []
        self._reins = Reins()
        self._client = Client()
        self._chunks: list[InputChunk | None] = []
        self._held_back: list[int] = []
        self._acknowledged = -1

    async def play(self) -> list[ServerMessage]:
        await self._open()
        steps: dict[Callable[[], None], int] = {
            self._text: 20,
            self._audio: 12,
            self._character: 3,
            self._end: 6,
            self._finish: 4,
            self._cancel: 5,
            self._configure: 5,
            self._truncate: 3,
            self._refused: 3,
            self._leave_gap: 4,
            self._fill_gap: 5,
            self._name: 2,
            self._acknowledge: 6,
            self._played: 5,
            self._doze: 4,
            self._allow: 12,
        }
        for _ in range(STEPS):
            (step,) = self._rng.choices(list(steps), list(steps.values()))
            self.story.append(step.__name__)
            step()
            if self._news is not None and self._news.random() < 0.1:
                self._session.conversation.tell(Telling(f"news {len(self.story)}"))
            passes, moves = self._rng.choice([0, 0, 1, 2, 5, SETTLED]), self._rng.random() < 0.2
            await self._rest(passes)
            if moves and self._moves:
                await self._move()
            await self._rest(SETTLED)
            await asyncio.sleep(self._rng.choice([0, 0.3]))
        self._reins.let_go()
        self._fill_gap()
        self._finish()
        self._wake()
        await self._rest(10 * SETTLED)
        assert not self._session.conversation.busy
        await self._server.stop()
        return [one for one in self._client.received if type(one) not in OF_THE_MOMENT]

    async def _open(self) -> None:
        self._server = Server(self._reins)
        await self._server.engine.start()
        self._session = self._server.sessions.open(None)
        self._client.come(self._session)
        self._session.attach(self._client)
        self._reins.loose = self._rng.random() < 0.3

    async def _move(self) -> None:
        """The session goes on in another server, and the first one is gone before it can say anything."""
        self.moved += 1
        token = self._session.new_token()
        assert token is not None
        data = self._server.sessions.save(self._session)
        self._session.detach(self._client)
        received = list(self._client.received)
        before, self._server = self._server, Server(self._reins)
        await self._server.engine.start()
        self._client.received = received
        self._client.lose(max(self._fate.randint(self._acknowledged, self._client.last_output), self._kept()))
        self._server.sessions.restore(data, None)
        self._session = self._server.sessions.claim(self._session.session_id, token, None)
        await before.stop()
        if self._fate.random() < 0.5:  # also later
            await self._rest(self._fate.choice([1, 3, SETTLED]))
        last_output = self._client.last_output
        assert self._session.can_resume(last_output)
        self._client.come(self._session)
        resumed, _ = self._session.resume(self._client, last_output)
        assert resumed.session_id == self._session.session_id
        self._acknowledged = last_output
        for number in range(resumed.next_sequence_id, len(self._chunks)):
            if number not in self._held_back:
                self._send(number)
        self._client.output_ready()

    def _kept(self) -> int:
        """The output that the client must not lose.

        What it loses comes again when it reads. Until then a cancel withdraws the outputs of an answer that has not
        ended, as all that nobody has received; that cannot be as if it had stayed. See
        ``test_a_cancel_withdraws_what_the_client_lost_and_has_not_read_again``.
        """
        if self._client.reads:
            return -1
        ended = [one.sequence_id for one in self._client.received if isinstance(one, FinalChunk)]
        return self._client.last_output if self._client.last_output > max(ended, default=-1) else -1

    # steps

    def _text(self) -> None:
        self._chunk(Modality.TEXT, f"word {len(self._chunks)} ".encode(), end=self._rng.random() < 0.4)

    def _audio(self) -> None:
        samples = bytes(self._rng.randrange(256) for _ in range(320))
        self._chunk(Modality.AUDIO, samples, end=self._rng.random() < 0.2)

    def _character(self) -> None:
        self._chunk(Modality.TEXT, self._rng.choice([b"caf\xc3", b"\xa9 ", b"\xff"]))

    def _end(self) -> None:
        self._chunk(Modality.TEXT, b"", end=True)

    def _name(self) -> None:
        self._chunk(Modality.TEXT, b"", ref=f"name {len(self._chunks)}")

    def _finish(self) -> None:
        self._session.conversation.finish()

    def _cancel(self) -> None:
        named = self._rng.random() < 0.5
        requests = self._session.conversation.queue.requests
        self._session.conversation.cancel(requests[-1].request_id if named and requests else None)

    def _configure(self) -> None:
        patch: dict[str, Any] = {
            "overlap": self._rng.choice(["wait", "interrupt"]),
            "start_policy": self._rng.choice(["on_first_chunk", "on_end_only", None]),
            "after_start": self._rng.choice(["extend", "snapshot"]),
            "modalities": self._rng.choice([["text"], ["text", "audio"], None]),
            "output_audio": {"sample_rate": 16_000},
            "history": self._rng.random() < 0.8,
        }
        self._session.conversation.configure(patch)

    def _truncate(self) -> None:
        finals = [one for one in self._client.received if isinstance(one, FinalChunk)]
        number = self._rng.random()
        if not finals or not self._client.reads:
            return
        request_id = finals[int(number * len(finals))].request_id
        try:
            dropped = self._session.conversation.truncate_history(request_id)
        except (SessionConflict, InvalidValue) as error:
            self._session.outbox.put_nowait(error)
            return
        self._session.outbox.put_nowait(HistoryTruncatedFrame(request_id=request_id, dropped_requests=dropped))

    def _refused(self) -> None:
        self._chunks.append(None)
        self._send(len(self._chunks) - 1)

    def _leave_gap(self) -> None:
        if not self._held_back:
            self._held_back.append(len(self._chunks))
            self._chunks.append(InputChunk(Modality.TEXT, b"late ", len(self._chunks)))

    def _fill_gap(self) -> None:
        held_back, self._held_back = self._held_back, []
        for number in held_back:
            self._send(number)

    def _acknowledge(self) -> None:
        if self._client.reads:
            self._acknowledged = self._client.last_output
            self._session.outbox.acknowledge(self._acknowledged)

    def _played(self) -> None:
        self._session.conversation.report_playback(self._rng.choice([0, 5, 10, 1000]))

    def _doze(self) -> None:
        self._client.reads = not self._client.reads
        self._wake(self._client.reads)

    def _wake(self, reads: bool = True) -> None:
        self._client.reads = reads
        self._client.output_ready()

    def _allow(self) -> None:
        outputs = self._rng.choice([1, 1, 3])
        if (current := self._session.conversation.queue.current) is not None:
            self._reins.allow(current.request_id, outputs)

    # frames

    def _chunk(self, modality: Modality, payload: bytes, *, end: bool = False, ref: str | None = None) -> None:
        number = len(self._chunks)
        self._chunks.append(InputChunk(modality, payload, number, end_of_input=end, ref=ref))
        self._send(number)

    def _send(self, number: int) -> None:
        chunk, conversation = self._chunks[number], self._session.conversation
        if chunk is None:
            conversation.refuse_chunk(number)
            return
        conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())

    async def _rest(self, passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)


def named_by_order(messages: list[ServerMessage]) -> list[Any]:
    """The messages with names for the ids of requests by which two runs are the same."""
    names: dict[str, str] = {}

    def named(fields: dict[str, Any]) -> dict[str, Any]:
        request_id = fields.get("request_id")
        if request_id is not None:
            fields["request_id"] = names.setdefault(request_id, f"request {len(names)}")
        return fields

    found: list[Any] = []
    for message in messages:
        if isinstance(message, OmniError):
            found.append((message.code, named(dict(vars(message)))))
        elif isinstance(message, FinalChunk):
            found.append(named(dataclasses.asdict(dataclasses.replace(message, times={}))))  # none after a move
        elif isinstance(message, RequestWarning):
            found.append(message.error.code)
        else:
            found.append((type(message).__name__, named(msgspec.structs.asdict(message))))
    return found


@pytest.mark.counts_passes
@pytest.mark.parametrize(
    ("seed", "news"), [*((seed, False) for seed in [*range(20), 78, 114, 128]), *((seed, True) for seed in range(11))]
)
async def test_a_session_goes_on_in_another_server_as_if_it_had_not_moved(seed: int, news: bool) -> None:
    stays, moves = Wandering(seed, moves=False, news=news), Wandering(seed, moves=True, news=news)
    expected = named_by_order(await stays.play())
    found = named_by_order(await moves.play())
    assert moves.story == stays.story
    assert moves.moved > 2
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert one == other, f"message {place} of {len(expected)}, after {found[max(0, place - 2) : place]}"
    assert len(found) == len(expected)
    assert sum(isinstance(one, tuple) and one[0] == "OutputChunk" for one in found) > 2


@pytest.mark.parametrize("reads", [True, False])
async def test_a_cancel_withdraws_what_the_client_lost_and_has_not_read_again(reads: bool) -> None:
    """It is told again, at the pause after the next turn, if nobody has received any of it; otherwise it is not."""
    reins = Reins()
    before, after = Server(reins), Server(reins)
    await before.engine.start()
    session, client = before.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    reins.loose = False
    session.conversation.tell(Telling("the news"))
    await asyncio.sleep(5)
    current = session.conversation.queue.current
    assert current is not None
    reins.allow(current.request_id, 3)
    await asyncio.sleep(1)
    assert client.last_output == 2
    client.reads = reads
    session = await moved(session, client, before, after, lost=3)
    await asyncio.sleep(1)
    session.conversation.cancel()
    await asyncio.sleep(1)
    client.reads = True
    client.output_ready()
    reins.let_go()
    chunk = InputChunk(Modality.TEXT, b"And now?", 0, end_of_input=True)
    session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
    await asyncio.sleep(10)
    outputs = [one for one in client.received if isinstance(one, AnyOutput)]
    assert [one.sequence_id for one in outputs] == list(range(len(outputs)))
    finals = [one for one in outputs if isinstance(one, FinalChunk)]
    first = [one for one in outputs if one.request_id == current.request_id]
    assert [type(one) for one in first] == [*([OutputChunk] * 3 if reads else []), FinalChunk]
    assert finals[0].finish_reason is FinishReason.CANCELLED
    assert finals[0].usage.output_tokens == (2 if reads else 0)
    starts = [one.trigger for one in client.received if isinstance(one, ResponseStartedFrame)]
    assert starts.count(StartTrigger.TELLING) == (1 if reads else 2)
    assert len(finals) == len(starts) == (2 if reads else 3)
    seen = "".join(
        one.text for one in outputs if isinstance(one, OutputChunk) and one.request_id == finals[1].request_id
    )
    assert ("assistant: <>[This is/" in seen) is reads
    await after.stop()


async def test_a_saved_session_is_for_its_key_and_its_token() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    own, other = ApiKey(name="own", key_sha256=b""), ApiKey(name="other", key_sha256=b"")
    session = first.sessions.open(own)
    token = session.new_token()
    assert token is not None
    data = first.sessions.save(session)
    for key in (other, None):
        with pytest.raises(SessionNotFound):
            second.sessions.restore(data, key)
    with pytest.raises(SessionNotFound):
        second.sessions.restore(data[:-5], own)
    assert second.factory.admission.sessions == 0
    restored = second.sessions.restore(data, own)
    for wrong, key in ((token, None), ("wrong", own)):
        with pytest.raises(SessionNotFound):
            second.sessions.claim(session.session_id, wrong, key)
    assert second.sessions.claim(session.session_id, token, own) is restored
    await first.stop()
    await second.stop()


def no_sessions(data: bytes) -> Iterator[bytes]:
    """Bytes that are no saved session, most of them nearly that of ``data``."""
    yield from (b"", b"null", b"\xc1", b"\x80", b"\x90", b"\x81" * 5000, b"\x91" * 5000, b"a session", data + b"\0")
    yield from (data[:end] for end in range(0, len(data), 97))
    yield from (data[start:] for start in range(1, len(data), 499))
    yield data.replace(b"be kind", b"\xff" * 7, 1)  # no UTF-8
    deep = b"\xa7be kind"
    yield data.replace(deep, b"\x81\xa1a" * 5000 + deep, 1)
    kept = msgspec.msgpack.decode(data)
    output = kept["conversation"]["output"]
    final = FinalChunk(request_id="req_1", sequence_id=0, finish_reason=FinishReason.STOP, usage=Usage())
    for message in (
        SavedMessage("OmniError"),
        SavedMessage("RequestWarning", errors=[None]),
        SavedMessage("FinalChunk", b"\xc0"),
        SavedMessage("Thing"),
        SavedMessage("OutputChunk", b"\x90"),
        msgspec.structs.replace(SavedMessage.of(final), errors=[None]),
    ):
        output["kept"] = [[msgspec.to_builtins(message, builtin_types=(bytes,)), 0]]
        yield msgspec.msgpack.encode(kept)
    output["kept"] = []
    kept["conversation"]["ledger"] = b"no ledger"
    yield msgspec.msgpack.encode(kept)


async def test_bytes_that_are_no_saved_session_are_refused_with_one_error() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session = first.sessions.open(None)
    session.conversation.configure({"instructions": "be kind"})
    session.conversation.receive_chunk(InputChunk(Modality.TEXT, b"hello", 0, end_of_input=True), now=0)
    data = first.sessions.save(session)
    for strange in no_sessions(data):
        with pytest.raises(SessionNotFound, match="this session cannot be resumed here"):
            second.sessions.restore(strange, None)
        assert (second.factory.admission.sessions, second.factory.budget.held) == (0, 0)
    second.sessions.restore(data, None)
    await first.stop()
    await second.stop()


async def test_what_is_saved_has_neither_tokens_nor_what_only_the_operator_may_read() -> None:
    server = Server(Reins())
    await server.engine.start()
    session = server.sessions.open(ApiKey(name="own", key_sha256=b"the digest of a key"))
    first = session.new_token()
    assert first is not None
    session.spend(first)
    second = session.new_token()
    assert second is not None
    failure = EngineFailed("the upstream failed", private="with key sk-1", logged="to user@host")
    session.outbox.put_nowait(failure)
    data = server.sessions.save(session)
    for secret in (first.encode(), second.encode(), b"the digest of a key", b"sk-1", b"user@host"):
        assert secret not in data
    assert (failure.private, failure.logged) == ("with key sk-1", "to user@host")
    await server.stop()


async def test_nobody_comes_back_to_a_restored_session() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    second.sessions.restore(first.sessions.save(first.sessions.open(None)), None)
    began = asyncio.get_running_loop().time()
    await second.sessions.wait_closed()
    assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=0.1)
    await first.stop()
    await second.stop()


async def test_words_to_expect_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    able = dataclasses.replace(Server(Reins()).engine.capabilities, keywords=True)
    monkeypatch.setattr(ReinedEngine, "capabilities", able)
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session = first.sessions.open(None)
    wanted = {"input_audio": {"keywords": ["Jon Dashwoode"], "prompt": "Then."}}
    session.conversation.configure(wanted)
    restored = second.sessions.restore(first.sessions.save(session), None)
    configuration = restored.conversation.configuration
    assert configuration.wanted == wanted
    assert configuration.effective.input_audio.keywords == ["Jon Dashwoode"]
    await first.stop()
    await second.stop()


async def test_what_a_server_does_not_know_leaves_nothing_behind() -> None:
    first, second = Server(Reins()), Server(Reins())
    await first.engine.start()
    await second.engine.start()
    session = first.sessions.open(None)
    loop = asyncio.get_running_loop()
    for number, text in enumerate(["hello ", "open "]):
        chunk = InputChunk(Modality.TEXT, text.encode(), number, end_of_input=not number)
        session.conversation.receive_chunk(chunk, now=loop.time())
        await asyncio.sleep(1)
    session.conversation.receive_chunk(InputChunk(Modality.TEXT, b"behind a gap", 3), now=loop.time())
    session.outbox.put_nowait(InvalidValue("no"))
    data = first.sessions.save(session)
    assert data.count(b"invalid_value") == 1
    for strange in (data.replace(b"invalid_value", b"invalid_thing"), data.replace(b"on_min_length", b"on_big_length")):
        with pytest.raises(SessionNotFound):
            second.sessions.restore(strange, None)
        assert (second.factory.admission.sessions, second.factory.budget.held) == (0, 0)
    with pytest.raises(SessionNotFound):
        first.sessions.restore(data, None)  # it is there already
    second.sessions.restore(data, None)
    await first.stop()
    await second.stop()


async def moved(session: Session, client: Client, before: Server, after: Server, *, lost: int = 0) -> Session:
    """Save the session of a server that stops, and have its client resume it on another, which this starts.

    The client has lost the last outputs, ``lost`` in number.
    """
    token = session.new_token()
    assert token is not None
    data = before.sessions.save(session)
    session.detach(client)
    await after.engine.start()
    await before.stop()
    after.sessions.restore(data, None)
    session = after.sessions.claim(session.session_id, token, None)
    client.come(session)
    client.lose(client.last_output - lost)  # what came behind it comes again
    session.resume(client, client.last_output)
    client.output_ready()
    return session


async def listening() -> tuple[Server, Session, Client]:
    """A server with a session that detects turns and answers in text, and the client of the session."""
    server = Server(Reins(), InlineWorkers())
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    session.conversation.configure({"modalities": ["text"], "turn_detection": {"type": "server_vad"}})
    return server, session, client


async def spoken(*, moves_at: int) -> list[ServerMessage]:
    """What a client gets that speaks for 800 ms and is silent then; after so many chunks of 20 ms its session moves."""
    server, session, client = await listening()
    audio = quiet(400) + loud(800) + quiet(1200)
    for number, start in enumerate(range(0, len(audio), 20 * MS)):
        if number == moves_at:
            before, server = server, Server(Reins(), InlineWorkers())
            session = await moved(session, client, before, server)
        chunk = InputChunk(Modality.AUDIO, audio[start : start + 20 * MS], number)
        session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
    await asyncio.sleep(5)
    await server.stop()
    return client.received


@pytest.mark.parametrize("moves_at", [*range(15, 90, 5), 200])
async def test_who_speaks_while_the_session_moves_is_answered_once(moves_at: int) -> None:
    received = await spoken(moves_at=moves_at)
    finals = [one for one in received if isinstance(one, FinalChunk)]
    assert [one.finish_reason for one in finals] == [FinishReason.STOP]
    # All of the speech is heard, less what is too short for the detector to begin anew with.
    assert 700 <= finals[0].usage.input_audio_ms <= 2000
    kinds = [type(one) for one in received if isinstance(one, SpeechStartedFrame | SpeechStoppedFrame)]
    assert kinds == [SpeechStartedFrame, SpeechStoppedFrame] * (len(kinds) // 2)
    assert 1 <= len(kinds) // 2 <= 2
    times = [one.audio_ms for one in received if isinstance(one, SpeechStartedFrame | SpeechStoppedFrame)]
    assert times == sorted(times)
    assert times[0] == 384  # wherever it moves


@pytest.mark.parametrize("behind", [b"", loud(400)], ids=["silence", "speech"])
@pytest.mark.parametrize("moves", [False, True])
async def test_a_cancel_that_waits_behind_speech_moves_with_the_session(moves: bool, behind: bytes) -> None:
    """Of what was said before it nothing is answered, and all of what is said after it."""
    server, session, client = await listening()
    now = asyncio.get_running_loop().time
    for number, audio in enumerate((quiet(400) + loud(800), quiet(640))):
        session.conversation.receive_chunk(InputChunk(Modality.AUDIO, audio, number), now=now())
    session.conversation.cancel()
    if moves:
        before, server = server, Server(Reins(), InlineWorkers())
        session = await moved(session, client, before, server)
    for number, audio in enumerate((quiet(400) + behind, quiet(1200)), 2):
        session.conversation.receive_chunk(InputChunk(Modality.AUDIO, audio, number), now=now())
        await asyncio.sleep(1)
    await asyncio.sleep(5)
    await server.stop()
    finals = [one for one in client.received if isinstance(one, FinalChunk)]
    assert len(finals) == bool(behind)
    assert all(one.usage.input_audio_ms < 1200 for one in finals)


async def being_answered(server: Server, **turn_detection: bool) -> tuple[Session, Client]:
    """A session on a server that it starts, and its client, who hears the beginning of an answer."""
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    session.conversation.configure({"turn_detection": {"type": "server_vad", **turn_detection}})
    now = asyncio.get_running_loop().time()
    session.conversation.receive_chunk(InputChunk(Modality.TEXT, b"talk", 0, end_of_input=True), now=now)
    await asyncio.sleep(0.5)
    return session, client


async def over_an_answer(sound: bytes, *, moves_at: int) -> list[ServerMessage]:
    """What a client gets that makes this sound over an answer; after so many chunks of 20 ms its session moves."""

    def server_of_this() -> Server:
        ramp = np.linspace(0, 0.5, 1600, dtype=np.float32)
        answer = [TextOutput("so it goes on"), *(AudioOutput(ramp, 16_000) for _ in range(60))]
        heard = [TranscriptOutput("What time is it?"), TextOutput("Noon.")]
        return Server(Reins(), InlineWorkers(), HearingEngine(answer, heard=heard))

    server = server_of_this()
    session, client = await being_answered(server, duck=True)
    now = asyncio.get_running_loop().time
    audio = quiet(400) + sound + quiet(1200)
    for number, start in enumerate(range(0, len(audio), 20 * MS)):
        if number == moves_at:
            before, server = server, server_of_this()
            session = await moved(session, client, before, server)
        session.conversation.receive_chunk(
            InputChunk(Modality.AUDIO, audio[start : start + 20 * MS], number + 1), now=now()
        )
        await asyncio.sleep(0.02)
    await asyncio.sleep(8)
    await server.stop()
    return client.received


@pytest.mark.parametrize("moves_at", [10, 24, 26, 28, 30, 35, 40, 41, 42, 43, 44, 45, 46, 50])
@pytest.mark.parametrize("words", [False, True])
async def test_an_uncertain_onset_is_decided_once_wherever_the_session_moves(
    words: bool, moves_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.95)
    received = await over_an_answer(loud(1100 if words else 440), moves_at=moves_at)
    told = [
        one
        for one in received
        if isinstance(one, SpeechStartedFrame | SpeechConfirmedFrame | SpeechDismissedFrame | SpeechStoppedFrame)
    ]
    kinds = [type(one) for one in told]
    decided = [SpeechConfirmedFrame, SpeechStoppedFrame] if words else [SpeechDismissedFrame]
    assert kinds == [SpeechStartedFrame, *decided]
    assert len({one.turn_id for one in told}) == 1
    finals = [one.finish_reason for one in received if isinstance(one, FinalChunk)]
    assert finals == ([FinishReason.CANCELLED, FinishReason.STOP] if words else [FinishReason.STOP])


@pytest.mark.parametrize(("said", "answer"), [("What time is it?", ["Noon."]), ("Stop.", [])])
async def test_an_answer_that_is_held_as_the_session_moves_is_cut_where_it_was_heard(
    said: str, answer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the speech that interrupted it is answered, unless it only asks for silence."""
    monkeypatch.setattr(speech_watch, "backchannel_probability", lambda samples: 0.1)

    def server_of_this() -> Server:
        piece = np.full(1600, 0.1, np.float32)
        words = [Word(f"word{number}", number * 100, number * 100 + 90) for number in range(60)]
        talk = [
            TextOutput(" ".join(one.text for one in words)),
            *(AudioOutput(piece, 16_000, (one,)) for one in words),
        ]
        heard = [TranscriptOutput(said), TextOutput("Noon."), *[AudioOutput(piece, 16_000)] * 10]
        return Server(Reins(), InlineWorkers(), HearingEngine(talk, heard=heard))

    server = server_of_this()
    session, client = await being_answered(server, interrupt_resume=True)
    now = asyncio.get_running_loop().time
    audio = quiet(400) + loud(800) + quiet(1200)
    for number, start in enumerate(range(0, len(audio), 20 * MS), 1):
        if number == 46:
            assert session.conversation.queue.requests[0].state is RequestState.HELD
            before, server = server, server_of_this()
            session = await moved(session, client, before, server)
        chunk = InputChunk(Modality.AUDIO, audio[start : start + 20 * MS], number)
        session.conversation.receive_chunk(chunk, now=now())
        await asyncio.sleep(0.02)
    await asyncio.sleep(5)
    messages = [(one.role, one.text) for one in session.conversation.ledger.history.messages()]
    await server.stop()
    finals = [one.finish_reason for one in client.received if isinstance(one, FinalChunk)]
    assert finals == [FinishReason.CANCELLED, FinishReason.STOP]
    heard = " ".join(f"word{number}" for number in range(15))
    answers = [("assistant", one) for one in answer]
    assert messages == [("user", "talk"), ("assistant", heard), ("user", said), *answers]


def test_playback_goes_on_by_another_clock() -> None:
    budget = ByteBudget(1 << 20)
    before, ledger = Ledger(100, budget), Ledger(100, budget)
    before.send(before.open("req_1", speaks=True), 0, 0, 1000, 10.0)
    ledger.restore(before.to_bytes(), later=500)
    entry = ledger.find("req_1")
    assert entry is not None
    assert ledger.position_ms(entry, 510.3) == 300


def restored(message: ServerMessage) -> ServerMessage:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(SavedMessage.of(message)), type=SavedMessage).restored()


@pytest.mark.parametrize(
    "message",
    [
        SessionUpdatedFrame(instructions="be brief"),
        SpeechStartedFrame(audio_ms=1, turn_id="turn_1"),
        SpeechStoppedFrame(audio_ms=2, request_id="req_1"),
        OutputChunk("req_1", 7, OutputModality.AUDIO, payload=b"x", format=AudioFormat(), words=(Word("hi", 0, 9),)),
        OutputChunk("req_1", 8, OutputModality.TOOL_CALL, tool_call=ToolCallFragment(0, "call_1", "f", "{}")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_kind_of_message_is_restored(message: ServerMessage) -> None:
    assert restored(message) == message


def test_a_final_is_restored_with_its_warnings_in_their_order() -> None:
    warnings = (AnswerWarning("one", "first"), InvalidValue("second"), AnswerWarning("three", "third"))
    usage = Usage(input_tokens=1, output_audio_ms=2)
    final = FinalChunk(
        request_id="req_1",
        sequence_id=9,
        finish_reason=FinishReason.LENGTH,
        usage=usage,
        warnings=warnings,
        citations=(
            UrlCitation("A", "https://example.com/", 0, 3, "CC0-1.0"),
            UrlCitation("B", "https://b.example", 0, 0),
        ),
    )
    again = restored(final)
    assert isinstance(again, FinalChunk)
    assert [one.message for one in again.warnings] == ["first", "second", "third"]
    assert dataclasses.replace(again, warnings=()) == dataclasses.replace(final, warnings=())


def test_every_kind_of_error_is_restored() -> None:
    error = InvalidValue("no", param="field", sequence_id=3)
    error.request_id, error.ref = "req_1", "mine"
    for message in (error, RequestWarning(error)):
        told = restored(message)
        again = told.error if isinstance(told, RequestWarning) else told
        assert type(again) is InvalidValue
        assert vars(again) == vars(error)
        assert str(again) == "no"


class Finder(PlayingEngine):
    """Calls a tool, slowly, and says slowly where something is once it knows it."""

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        async def a_moment() -> None:
            await asyncio.sleep(0.15)

        if taken[0].payload == b"find it":
            call = ToolCallOutput(ToolCallFragment(0, "call_1", "find", "{}"))
            return [a_moment, call, Finished(FinishReason.TOOL_CALLS, Usage())]
        return [a_moment, TextOutput("in "), a_moment, TextOutput("Lisbon")]


async def told(*, moves_at: int) -> tuple[str, int]:
    """What a client gets of a tool's late result if the session moves after so many steps, and how often it is told."""

    def server_of_this() -> Server:
        return Server(Reins(), engine=Finder(tools=True))

    server = server_of_this()
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    tool = {"type": "function", "async": True, "function": {"name": "find"}}
    session.conversation.configure({"tools": [tool], "modalities": ["text"]})
    chunks = {2: InputChunk(Modality.TEXT, b"find it", 0, end_of_input=True)}
    chunks[5] = InputChunk(Modality.TEXT, b"Lisbon", 1, tool_call_id="call_1")
    for step in range(16):
        if step == moves_at:
            before, server = server, server_of_this()
            session = await moved(session, client, before, server)
        if (chunk := chunks.get(step)) is not None:
            session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
        await asyncio.sleep(0.1)
    await asyncio.sleep(5)
    await server.stop()
    text = "".join(one.text for one in client.received if isinstance(one, OutputChunk))
    starts = [one.trigger for one in client.received if isinstance(one, ResponseStartedFrame)]
    return text, starts.count(StartTrigger.TELLING)


@pytest.mark.parametrize("moves_at", range(1, 14))
async def test_a_late_result_is_told_once_wherever_the_session_moves(moves_at: int) -> None:
    assert await told(moves_at=moves_at) == ("in Lisbon", 1)


async def test_nobody_is_asked_while_a_tool_works_whose_session_has_moved() -> None:
    server = Server(Reins(), engine=Finder(tools=True))
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    tool = {"type": "function", "function": {"name": "find"}}
    session.conversation.configure({"tools": [tool], "modalities": ["text"], "idle_prompt": {"after_sec": 5}})
    now = asyncio.get_running_loop().time
    session.conversation.receive_chunk(InputChunk(Modality.TEXT, b"find it", 0, end_of_input=True), now=now())
    await asyncio.sleep(1)
    before, server = server, Server(Reins(), engine=Finder(tools=True))
    session = await moved(session, client, before, server)
    await asyncio.sleep(30)
    result = InputChunk(Modality.TEXT, b"Lisbon", 1, tool_call_id="call_1")
    session.conversation.receive_chunk(result, now=now())
    await asyncio.sleep(10)
    await server.stop()
    starts = [one.trigger for one in client.received if isinstance(one, ResponseStartedFrame)]
    assert starts == [StartTrigger.MIN_LENGTH, StartTrigger.END_OF_INPUT, StartTrigger.IDLE]


async def test_input_is_counted_by_the_server_that_received_it() -> None:
    server = Server(Reins())
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    counted = []
    for number, text in enumerate([b"two", b"words"]):
        if number:
            before, server = server, Server(Reins())
            session = await moved(session, client, before, server)
            counted.append(before)
        chunk = InputChunk(Modality.TEXT, text, number)
        session.conversation.receive_chunk(chunk, now=asyncio.get_running_loop().time())
    await server.stop()
    values = [one.factory.metrics.registry.get_sample_value for one in (*counted, server)]
    assert [value("omni_ws_input_bytes_total") for value in values] == [3, 5]
    assert [value("omni_ws_input_chunks_total") for value in values] == [1, 1]


@pytest.mark.parametrize("moves", [False, True])
async def test_input_that_waits_for_its_time_moves_with_the_session(moves: bool) -> None:
    server = Server(Reins(), engine=PlayingEngine([TextOutput("so it is")]))
    await server.engine.start()
    session, client = server.sessions.open(None), Client()
    client.come(session)
    session.attach(client)
    session.conversation.configure(
        {"modalities": ["text"], "alignment": "timestamp", "start_policy": "on_first_chunk", "history": True}
    )
    now = asyncio.get_running_loop().time
    pieces = [(Modality.AUDIO, b"..", 0), (Modality.TEXT, b"first", 100), (Modality.TEXT, b", then", 5000)]
    for number, (modality, payload, at_ms) in enumerate(pieces):
        chunk = InputChunk(modality, payload, number, timestamp_ms=at_ms)
        session.conversation.receive_chunk(chunk, now=now())
    if moves:
        before, server = server, Server(Reins(), engine=PlayingEngine([TextOutput("so it is")]))
        session = await moved(session, client, before, server)
    session.conversation.finish()
    await asyncio.sleep(1)
    messages = [(one.role, one.text) for one in session.conversation.ledger.history.messages()]
    await server.stop()
    assert messages == [("user", "first, then"), ("assistant", "so it is")]
