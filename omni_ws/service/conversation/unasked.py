"""Speaks unasked in a conversation: while a tool works, after a long silence, and "mm-hm" in pauses of the user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples, as_pcm16, samples_from_pcm16
from omni_ws.core.chunks import (
    AudioFormat,
    InputChunk,
    InputMode,
    OutputModality,
    StartTrigger,
    Task,
    ToolCall,
)
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import AudioOutput, EngineOutput, GenerationRequest
from omni_ws.errors import OmniError
from omni_ws.service.conversation.remarks import Remarks, phrases, text_input
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.telling import Telling, Tellings
from omni_ws.service.conversation.tool_results import ToolResults
from omni_ws.service.failure import new_id, unexpected
from omni_ws.wire.server_frames import BackchannelFrame
from omni_ws.wire.session_config import SessionConfig, spoken_language

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation

logger = logging.getLogger(__name__)

#: How long the user has spoken at least before the server says "mm-hm", and how often it does at most.
LEAST_SPEECH_MS: Final = 4000
EVERY_SEC: Final = 8.0
#: The level of "mm-hm" beside that of answers: 12 dB below.
MURMURED: Final = 10 ** (-12 / 20)
#: A voice that takes longer for it does not say it well.
LONGEST_MURMUR_SEC: Final = 1.5


class Unasked:
    """Tells Remarks what goes on in a conversation, and has the conversation say what they find is due."""

    def __init__(self, conversation: Conversation, results: ToolResults) -> None:
        self._conversation = conversation
        self._results = results
        #: Called with the text of ``idle_prompt`` when it is due, in place of saying it.
        self.idled: Callable[[str], None] | None = None
        self._remarks = Remarks(lambda call_id: results.done(call_id) and not results.works(call_id))
        self.tellings = Tellings(conversation, results)
        self.murmurs = Murmurs(conversation, self)
        #: The request of the latest filler.
        self._filler: str | None = None
        #: Whether only async tools work, so that no filler comes after the first one.
        self._one_filler = False
        results.reserved = self._is_made_here

    def _is_made_here(self, call_id: str) -> bool:
        mcp = self._conversation.configuration.mcp
        return mcp is not None and mcp.has(call_id)

    def tell(self, telling: Telling, now: float) -> None:
        """See ``Conversation.tell``."""
        self.tellings.put(telling)
        self.note_quiet(now)

    def takes(self, result: InputChunk) -> bool:
        """Return whether the result of a tool is that of an async one, which is told now. Raises EngineOverloaded."""
        return self._results.take_late(result)

    def note_quiet(self, now: float) -> None:
        """Note whether anybody speaks, or an answer is due, and if not, since when."""
        conversation = self._conversation
        if conversation.stream.single_request:
            return
        receiving = conversation.receiving
        due = [one for one in conversation.queue.requests if one is not receiving or not one.session.only_results]
        spoken = conversation.spoken
        speaking = spoken.current is not None
        if due or speaking:
            by_user = any(
                one.remark is None and not one.session.only_results and not self.tellings.tells(one) for one in due
            )
            # An uncertain onset may be the echo of the question whether the user is still there.
            by_user = by_user or (speaking and spoken.onset is None)
            if by_user and self._one_filler:
                self._remarks.stop_fillers()
            self._remarks.disturb(by_user=by_user)
            self.tellings.note_quiet(None, now, by_user=by_user)
        else:
            since = conversation.ledger.played_by(now)
            self._remarks.quiet(since)
            self.tellings.note_quiet(since, now, by_user=False)
            conversation.watch_time()

    def note_end(self, request: Request) -> None:
        """Note that a request has its final: tools may work from now on, and something may be said meanwhile."""
        if request.remark is not None and request.error is not None:
            self._remarks.stop_fillers()
        calls, config, conversation = request.tool_calls, request.config, self._conversation
        self._call_servers(request)
        single = conversation.stream.single_request
        if not calls or request.error is not None or not request.entry.answer_kept or single:
            return
        later = self.tellings.note_calls(request)
        if not request.answerable:
            return
        wanted = config.tool_filler and conversation.configuration.rules.tool_filler != ""
        if wanted and "audio" in config.modalities and Task.SPEECH in conversation.engine.capabilities.tasks:
            awaited, spoken = [call.id for call in calls if call not in later], request.entry.sent_ms > 0
            self._one_filler = not awaited
            if awaited or not spoken:
                self._remarks.call(awaited or [call.id for call in later], spoken=spoken)

    def no_results_awaited(self, call_ids: Iterable[str]) -> bool:
        """Return whether no result of these calls is awaited."""
        return all(map(self._results.done, call_ids))

    def _call_servers(self, request: Request) -> None:
        """Have the calls of MCP tools made that an answer has ended with.

        In a single request, whose client gets the calls of its functions to answer, only if there are none of those.
        """
        mcp, calls = self._conversation.configuration.mcp, request.tool_calls
        if not mcp:
            return
        if request.remark is None and not request.session.received.tool_results:
            mcp.new_turn()
        if not calls or not request.answerable or not request.entry.answer_kept:
            return
        if self._conversation.stream.single_request and not all(mcp.find(call.name) for call in calls):
            return
        mcp.make(request.request_id, calls)
        self._results.withdraw(call for call in calls if mcp.find(call.name) and not mcp.has(call.id))

    def _withdraw(self, calls: Iterable[ToolCall]) -> None:
        """Want no results of these calls any more, and give up those that are being made."""
        calls = tuple(calls)
        self._results.withdraw(calls)
        self.tellings.withdraw(calls)
        if mcp := self._conversation.configuration.mcp:
            mcp.drop(call.id for call in calls)

    def get_timer(self) -> float | None:
        """Return when ``speak`` may have something to say; None if nothing depends on time."""
        conversation = self._conversation
        if conversation.draining:
            return None
        times = (self._remarks.get_timer(conversation.configuration.effective), self.tellings.get_timer())
        return min((when for when in times if when is not None), default=None)

    def speak(self, now: float) -> None:
        """Say what is due after a silence. Raises SessionTimeout if the user has not answered the idle prompt."""
        conversation, when = self._conversation, self.get_timer()
        if when is None or now < when:
            return
        if conversation.ledger.playing(now):  # the client plays more slowly than was thought
            self.note_quiet(now)
            return
        if self.tellings.speak(now):
            return
        config, own = conversation.configuration.effective, conversation.configuration.rules.tool_filler
        remark = self._remarks.due(config, language=self.language(config), filler=own, now=now)
        if remark is not None and remark.why is StartTrigger.IDLE and self.idled is not None:
            self.idled(remark.text)
        elif remark is not None:
            request_id = conversation.say(remark)
            self._filler = request_id if remark.why is StartTrigger.FILLER else self._filler
            if remark.why is StartTrigger.FILLER and self._one_filler:
                self._remarks.stop_fillers()

    def language(self, config: SessionConfig) -> str | None:
        """Return the language of the talk (primary subtag of RFC 5646); None if the voice does not speak it."""
        able = self._conversation.engine.capabilities
        reads = primary_subtag(able.voice_languages.get(config.voice or next(iter(able.voices), ""), ""))
        wanted = spoken_language(config.input_audio) or self._conversation.ledger.language or reads or "en"
        return wanted if wanted in able.speech_languages or reads in ("", wanted) else None

    def cancelled(self, request_id: str | None, named: Request | None, now: float) -> None:
        """Note a cancel of ``named``, the unfinished request that it means, before it takes effect.

        If it stops a filler, no more are said for the tools that work. If it stops an answer, or names one that is over
        and heard, nobody wants the results of its calls.
        """
        conversation = self._conversation
        filler = self._filler if request_id in (None, self._filler) else None
        stopped = named is not None and named.remark is not None
        if filler is not None and (stopped or conversation.ledger.stop(filler, now)):
            self._remarks.stop_fillers()
        self.tellings.cancelled(request_id, named)
        if named is not None:
            self._withdraw(named.tool_calls)
        elif request_id is not None and not conversation.ledger.stop(request_id, now):
            entry = conversation.ledger.find(request_id)
            self._withdraw(() if entry is None else entry.tool_calls)


class Murmurs:
    """Says "mm-hm" in the pauses of the user's long turns, with ``turn_detection.backchannel``.

    It is no request, and in no history or usage. The sounds of the latest voice are kept; one that is made too late for
    its pause waits for the next.
    """

    def __init__(self, conversation: Conversation, unasked: Unasked) -> None:
        self._conversation = conversation
        self._unasked = unasked
        #: The sound of each text, and the language, voice, speed and format that they are in.
        self._sounds: dict[str, bytes] = {}
        self._made_for: tuple[object, ...] = ()
        self._making: asyncio.Task[None] | None = None
        #: When the next may be said, and where the last was, in milliseconds of the session's audio.
        self._next_at = 0.0
        self._said_ms = 0
        self._said = 0

    def close(self) -> None:
        """Say nothing more."""
        if self._making is not None:
            self._making.cancel()
        self._forget()

    def take_breath(self, turn_id: str, began_ms: int, audio_ms: int) -> None:
        """Say something in the pause at ``audio_ms`` of the turn that began at ``began_ms``, if it is time to.

        Only once the listener has applied the rest of the piece: the speaker may go on in it.
        """
        asyncio.get_running_loop().call_soon(self._look, turn_id, began_ms, audio_ms)

    def _look(self, turn_id: str, began_ms: int, audio_ms: int) -> None:
        conversation = self._conversation
        if (
            audio_ms - max(began_ms, self._said_ms) < LEAST_SPEECH_MS
            or asyncio.get_running_loop().time() < self._next_at
        ):
            return
        request = conversation.receiving
        if request is None or not self._may_speak(turn_id):
            return
        config = request.config
        language = self._unasked.language(config)
        known = phrases().get(language or "")
        if known is None or not _wanted(config) or Task.SPEECH not in conversation.engine.capabilities.tasks:
            return
        text = known.murmur[self._said % len(known.murmur)]
        made_for = (language, config.voice, config.speed, config.output_audio)
        if made_for != self._made_for:
            self._forget()
            self._made_for = made_for
        if text in self._sounds:
            self._say(turn_id, text, config, audio_ms)
        elif self._making is None:
            making = self._make(turn_id, text, request, language, audio_ms)
            self._making = asyncio.create_task(making, name="a backchannel")

    def _may_speak(self, turn_id: str) -> bool:
        """Return whether the user is silent in this turn, nothing is played, and no answer is due."""
        conversation, current = self._conversation, self._conversation.spoken.current
        silent = conversation.listener is not None and conversation.listener.pausing
        listens = current is not None and current.turn_id == turn_id and conversation.spoken.onset is None
        busy = conversation.detached or conversation.is_playing or conversation.is_answering
        return silent and listens and not busy

    def _say(self, turn_id: str, text: str, config: SessionConfig, audio_ms: int) -> None:
        payload = self._sounds[text]
        if not payload:  # the voice does not say it well
            self._said += 1
            return
        audio = _raw_format(config)
        frame = BackchannelFrame(
            turn_id=turn_id, text=text, payload=payload, format=audio.encoding, sample_rate=audio.sample_rate
        )
        self._conversation.outbox.put_nowait(frame)
        self._next_at, self._said_ms = asyncio.get_running_loop().time() + EVERY_SEC, audio_ms
        self._said += 1

    async def _make(self, turn_id: str, text: str, request: Request, language: str | None, audio_ms: int) -> None:
        conversation, config, made_for = self._conversation, request.config, self._made_for
        able = conversation.engine.capabilities
        out = _Collected()
        wanted = GenerationRequest(
            request_id=new_id("req_"),
            task=Task.SPEECH,
            input=text_input(text),
            input_mode=InputMode.SNAPSHOT,
            input_audio=AudioFormat(),
            modalities=frozenset({OutputModality.AUDIO}),
            voice=config.voice,
            voice_named=request.voice_named,
            speed=config.speed,
            speech_language=language if language in able.speech_languages else None,
            owner=request.owner,
            near=request.near,
            conversation=request.conversation,
            media_room=request.media_room,
            lane=request.lane,
        )
        try:
            await conversation.engine.generate(wanted, out)
            if made_for != self._made_for:
                return
            sound = out.encoded(_raw_format(config))
            conversation.account.take(len(sound))
            self._sounds[text] = sound
            if self._may_speak(turn_id):
                self._say(turn_id, text, config, audio_ms)
        except Exception as error:
            failure = error if isinstance(error, OmniError) else unexpected(error, where="a backchannel")
            logger.debug("nothing is said in the user's pause: %s", failure.message)
            self._next_at = asyncio.get_running_loop().time() + EVERY_SEC
        finally:
            self._making = None

    def _forget(self) -> None:
        self._conversation.account.give(sum(map(len, self._sounds.values())))
        self._sounds.clear()


def _wanted(config: SessionConfig) -> bool:
    """Whether a request's configuration wants it. Not where the server takes its echo out: it would stay there."""
    turns = config.turn_detection
    return (
        turns is not None and turns.backchannel and "audio" in config.modalities and config.input_audio.echo != "server"
    )


def _raw_format(config: SessionConfig) -> AudioFormat:
    """Return the format of the session's output if it is raw, otherwise pcm16 at its rate."""
    audio = AudioFormat(config.output_audio.format, config.output_audio.sample_rate)
    return audio if audio.is_raw else AudioFormat(sample_rate=audio.sample_rate)


class _Collected:
    """An OutputWriter that keeps the sound."""

    full = False

    def __init__(self) -> None:
        self._pieces: list[Samples] = []
        self._rate = 0

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, AudioOutput) and sum(map(len, self._pieces)) <= LONGEST_MURMUR_SEC * output.sample_rate:
            samples = output.samples
            self._pieces.append(samples_from_pcm16(as_pcm16(samples)))
            self._rate = output.sample_rate

    async def drain(self) -> None:
        pass

    def encoded(self, audio: AudioFormat) -> bytes:
        """Return the sound, lowered; empty if it is too long."""
        samples = np.concatenate([*self._pieces, np.zeros(0, np.float32)])
        if not len(samples) or len(samples) > LONGEST_MURMUR_SEC * self._rate:
            return b""
        encoder = AudioEncoder(audio, source_rate=self._rate)
        return encoder.encode(samples * np.float32(MURMURED)) + encoder.flush()
