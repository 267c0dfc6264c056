"""Remarks of the server: news, fillers while a tool runs, a question after long silence, and "mm-hm" in pauses."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from omni_ws.audio.codec import AudioEncoder
from omni_ws.audio.pcm import Samples, as_samples
from omni_ws.core.chunks import (
    AudioFormat,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    StartTrigger,
    Task,
    ToolCall,
)
from omni_ws.core.history import PLACED, Message
from omni_ws.core.json_values import primary_subtag
from omni_ws.core.quota import Share, keep_newest
from omni_ws.engine.base import AudioOutput, EngineOutput, GenerationRequest
from omni_ws.errors import EngineOverloaded, OmniError, SessionTimeout
from omni_ws.service import (
    new_id,
    unexpected,
)
from omni_ws.service.conversation.request import Remark, Request, RequestState
from omni_ws.service.conversation.request_queue import text_input
from omni_ws.service.conversation.tool_results import MAX_CALLS, ToolResults
from omni_ws.wire.server_frames import BackchannelFrame
from omni_ws.wire.session_config import SessionConfig, spoken_language

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


logger = logging.getLogger(__name__)


class Unasked:
    """Says remarks unasked in a conversation: reports events to Remarks and Tellings, and says what they find due."""

    def __init__(self, conversation: Conversation, results: ToolResults) -> None:
        self._conversation = conversation
        self._results = results
        #: Called with the text of ``idle_prompt`` when it is due, in place of saying it.
        self.idled: Callable[[str], None] | None = None
        self._remarks = Remarks(lambda call_id: results.done(call_id) and not results.works(call_id))
        self.tellings = Tellings(conversation, results)
        self.murmurs = Murmurs(conversation, self.language)
        #: The request of the latest filler.
        self._filler: str | None = None
        #: Whether only async tools work, so that no filler comes after the first one; and when that one comes.
        self._one_filler = False
        self._acknowledged_sec = FIRST_FILLER_SEC

    def acknowledge_after(self, seconds: float) -> None:
        """Say the filler of async tools ``seconds`` after their calls, if the model has said nothing with them."""
        self._acknowledged_sec = seconds

    def connected(self) -> None:
        """Note that the client has a new connection."""
        self._remarks.connected()

    def saved_fillers(self) -> SavedFillers:
        """Return the saved fillers, without those for calls that this server makes: such calls end with the session."""
        saved = self._remarks.saved(only_one=self._one_filler)
        makes_call = self._conversation.configuration.makes_call
        saved.working = [one for one in saved.working if not makes_call(one)]
        return saved

    def restore_fillers(self, saved: SavedFillers) -> None:
        """Take over saved fillers."""
        self._remarks.restore(saved)
        self._one_filler = saved.only_one

    def note_news(self) -> None:
        """Note that there is news to tell or to know. If only async tools work, their filler is no longer said."""
        if self._one_filler:
            self._remarks.stop_fillers()

    def takes(self, result: InputChunk) -> bool:
        """If ``result`` is the first one of a call to an async tool, queue it as a telling.

        Returns whether the tool is async. Raises EngineOverloaded; InvalidValue if the result is not UTF-8.
        """
        return self._results.take_late(result)

    def note_quiet(self, now: float) -> None:
        """Look whether anybody speaks or an answer is due and, if not, since when it has been quiet.

        Call this at each change: fillers, the idle prompt, tellings and summaries of the talk wait for quiet.
        """
        conversation = self._conversation
        summaries = conversation.limits.summaries
        if conversation.stream.single_request:
            (summaries.disturb if conversation.queue.requests else summaries.note_quiet)(conversation)
            return
        receiving = conversation.receiving
        due = [one for one in conversation.queue.requests if one is not receiving or not one.session.only_results]
        spoken = conversation.spoken
        speaking = spoken.current is not None or conversation.enters_keys
        (summaries.disturb if due or speaking else summaries.note_quiet)(conversation)
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

    def close(self) -> None:
        """Say nothing more, as the conversation ends. Idempotent."""
        self.murmurs.close()
        self.tellings.close()
        self._conversation.limits.summaries.forget(self._conversation)

    def note_end(self, request: Request) -> None:
        """Note that a request has its final. From now on its tools run, and fillers may be said.

        Its calls of MCP tools are made, and its calls to async tools get WORKING as their result.
        """
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
        speaks = "audio" in config.modalities and Task.SPEECH in conversation.engine.capabilities.tasks
        awaited, spoken = [call.id for call in calls if call not in later], request.entry.sent_ms > 0
        if awaited or (wanted and speaks):
            self._one_filler = not awaited and (self._one_filler or not self._remarks.awaits)
            if awaited or not spoken:
                first_sec = FIRST_FILLER_SEC if awaited else self._acknowledged_sec
                ids, silent = awaited or [call.id for call in later], not (wanted and speaks)
                self._remarks.call(ids, spoken=spoken, first_sec=first_sec, silent=silent)

    def no_results_awaited(self, call_ids: Iterable[str]) -> bool:
        """Return whether none of these calls still waits for its result."""
        return all(map(self._results.done, call_ids))

    def _call_servers(self, request: Request) -> None:
        """Make the calls of MCP tools with which an answer has ended.

        A single request (HTTP) returns calls of the client's functions to the client: if there are any, no MCP call is
        made.
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
        """Note that results of these calls are no longer wanted, and cancel MCP calls that are being made."""
        calls = tuple(calls)
        self._results.withdraw(calls)
        self.tellings.withdraw(calls)
        if mcp := self._conversation.configuration.mcp:
            mcp.drop(call.id for call in calls)

    def get_timer(self) -> float | None:
        """Return when ``speak`` may have something to say; None if that does not depend on time."""
        conversation = self._conversation
        if conversation.draining:
            return None
        times = (self._remarks.get_timer(conversation.configuration.effective), self.tellings.get_timer())
        return min((when for when in times if when is not None), default=None)

    def speak(self, now: float) -> None:
        """Say what is due after a silence, if anything.

        Raises SessionTimeout if nobody has answered the idle prompt.
        """
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
        """Return the language of the conversation (primary subtag of RFC 5646); None if the voice does not speak it."""
        able = self._conversation.engine.capabilities
        reads = primary_subtag(able.voice_languages.get(config.voice or next(iter(able.voices), ""), ""))
        wanted = spoken_language(config.input_audio) or self._conversation.ledger.language or reads or "en"
        return wanted if wanted in able.speech_languages or reads in ("", wanted) else None

    def cancelled(self, request_id: str | None, named: Request | None, now: float) -> None:
        """Note a client's cancel before it takes effect.

        ``named`` is the unfinished request that the cancel names; None if it names none. If the cancel stops a filler,
        no more fillers are said for the tools that are running. If it stops an answer, or names one that has ended and
        was heard, the results of that answer's calls are no longer wanted.
        """
        conversation = self._conversation
        filler = self._filler if request_id in (None, self._filler) else None
        stopped = named is not None and named.remark is not None and named.remark.why is StartTrigger.FILLER
        if stopped or (filler is not None and conversation.ledger.stop(filler, now)):
            self._remarks.stop_fillers()
        self.tellings.cancelled(request_id, named)
        if named is not None:
            self._withdraw(named.tool_calls)
        elif request_id is not None and not conversation.ledger.stop(request_id, now):
            entry = conversation.ledger.find(request_id)
            self._withdraw(() if entry is None else entry.tool_calls)


# What the server says unasked in a silence: that a tool still works, and whether the user is still there.


#: The silence before the first filler of a tool call, and before each further one, in seconds.
FIRST_FILLER_SEC: Final = 1.5
NEXT_FILLER_SEC: Final = 8.0
#: Fillers for the same calls, about a minute of them: a client may never send a result.
MOST_FILLERS: Final = 7


class _Phrases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sentences of one language in remarks.toml."""

    filler: list[str]
    again: list[str]
    idle: str
    murmur: list[str]


@lru_cache(maxsize=1)
def phrases() -> dict[str, _Phrases]:
    """Return the sentences of remarks.toml, by primary subtag of the language."""
    text = files(__package__).joinpath("remarks.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, _Phrases])


class SavedFillers(msgspec.Struct, kw_only=True):
    """The calls for which fillers are said, in a form that can be written to bytes; see Remarks and Unasked."""

    working: list[str] = []
    fillers: int = 0
    said: bool = False
    first_sec: float = FIRST_FILLER_SEC
    silent: bool = False
    only_one: bool = False


class Remarks:
    """Decides when the server of a session speaks unasked, and what it says. Has no clock: ``now`` is an argument.

    ``quiet`` and ``disturb`` tell it since when nobody has spoken. While a tool runs, fillers ("One moment.") are said:
    the first after a silence of ``first_sec`` if nothing was said with the call or since, all others after one of
    NEXT_FILLER_SEC. With ``idle_prompt`` the user is asked once in each silence, and the session may end after that.
    While a tool runs, the user is not asked before the last filler, or the time of the last filler if none is wanted.

    ``is_done`` returns whether the result of a call is no longer awaited.
    """

    __slots__ = ("_asked", "_fillers", "_first_sec", "_is_done", "_said", "_silent", "_since", "_turn", "_working")

    def __init__(self, is_done: Callable[[str], bool]) -> None:
        self._is_done = is_done
        #: Since when nobody has spoken; None while anybody does, or an answer is due.
        self._since: float | None = None
        #: Calls whose results are awaited, by id.
        self._working: dict[str, None] = {}
        #: The fillers for these calls so far, and whether the user heard or said anything since the calls.
        self._fillers = 0
        self._said = False
        self._first_sec = FIRST_FILLER_SEC
        #: Whether no fillers are wanted: the silence in their place counts all the same.
        self._silent = False
        #: The number of fillers in the session so far: the sentences take turns.
        self._turn = 0
        #: Whether the user was asked in this silence.
        self._asked = False

    def connected(self) -> None:
        """Note that the client has a new connection: in the silence so far, the user may be asked once more."""
        self._asked = False

    def quiet(self, since: float) -> None:
        """Note that nobody has spoken since ``since``, and no answer is due."""
        self._since = since

    def disturb(self, *, by_user: bool) -> None:
        """Note that somebody speaks, or that an answer is due; ``by_user``: because the user said something."""
        self._since = None
        if by_user:
            self._asked, self._said = False, True

    def call(
        self, call_ids: Iterable[str], *, spoken: bool, first_sec: float = FIRST_FILLER_SEC, silent: bool = False
    ) -> None:
        """Note that an answer has ended with these tool calls.

        ``spoken``: the answer also had words. ``silent``: no fillers are wanted.
        """
        self._working.update(dict.fromkeys(call_ids))
        self._fillers, self._said, self._first_sec, self._silent = 0, spoken, first_sec, silent

    @property
    def awaits(self) -> bool:
        """Whether the result of any call is awaited for which fillers are said."""
        return not all(map(self._is_done, self._working))

    def stop_fillers(self) -> None:
        """Say no more fillers for the calls so far."""
        self._working.clear()

    def saved(self, *, only_one: bool) -> SavedFillers:
        """Return the saved form of the fillers."""
        return SavedFillers(
            working=[*self._working],
            fillers=self._fillers,
            said=self._said,
            first_sec=self._first_sec,
            silent=self._silent,
            only_one=only_one,
        )

    def restore(self, saved: SavedFillers) -> None:
        """Take over saved fillers. The silence before the next one begins anew."""
        self._working, self._fillers = dict.fromkeys(saved.working), saved.fillers
        self._said, self._first_sec, self._silent = saved.said, saved.first_sec, saved.silent

    def _next(self, config: SessionConfig) -> tuple[float, StartTrigger] | None:
        """Return when the next remark is due, and its kind; None for no remark.

        After the idle prompt, returns the time at which the session ends if nobody answers.
        """
        for done in [one for one in self._working if self._is_done(one)]:
            del self._working[done]
        since, idle = self._since, config.idle_prompt
        if since is None:
            return None
        if self._working and self._fillers < MOST_FILLERS:
            return since + (NEXT_FILLER_SEC if self._said else self._first_sec), StartTrigger.FILLER
        if idle is None or not idle.after_sec:
            return None
        wait = idle.closes_after_sec if self._asked else idle.after_sec
        return None if wait is None else (since + wait, StartTrigger.IDLE)

    def get_timer(self, config: SessionConfig) -> float | None:
        """Return when ``due`` may return a remark, or raise; None if that does not depend on time."""
        following = self._next(config)
        return None if following is None else following[0]

    def due(self, config: SessionConfig, *, language: str | None, filler: str | None, now: float) -> Remark | None:
        """Return the remark to say now, once; None for none.

        ``language`` is that of the conversation; None if no voice speaks it. ``filler`` is the operator's own sentence,
        which is the first filler. Raises SessionTimeout if nobody has answered the idle prompt.
        """
        following = self._next(config)
        if following is None or now < following[0]:
            return None
        self._since = now  # in a language without sentences nothing is said, and the silence goes on
        known = phrases().get(language or "")
        if following[1] is StartTrigger.FILLER:
            return self._filler(known, language, filler)
        if self._asked:
            raise SessionTimeout("nobody answered whether the user is still there")
        assert config.idle_prompt is not None
        if text := config.idle_prompt.text.strip():
            remark = Remark(text, StartTrigger.IDLE, field="idle_prompt.text")
        elif known is not None:
            remark = Remark(known.idle, StartTrigger.IDLE, language)
        else:
            return None
        self._asked = True
        return remark

    def _filler(self, known: _Phrases | None, language: str | None, own: str | None) -> Remark | None:
        first, self._fillers, self._said = not self._fillers, self._fillers + 1, True
        if self._silent:
            return None
        if own and (first or known is None):
            return Remark(own, StartTrigger.FILLER)
        if known is None:
            return None
        choice = known.filler if first else known.again
        self._turn += 1
        return Remark(choice[self._turn % len(choice) - 1], StartTrigger.FILLER, language)


# Says "mm-hm" in pauses of the user's long turns, to show that somebody listens.


#: How long the user has spoken at least before the server says "mm-hm", and the least time between two.
LEAST_SPEECH_MS: Final = 4000
EVERY_SEC: Final = 8.0
#: The level of "mm-hm" beside that of answers: 12 dB below.
MURMURED: Final = 10 ** (-12 / 20)
#: The longest "mm-hm": a voice that takes longer for it does not say it well.
LONGEST_MURMUR_SEC: Final = 1.5


class Murmurs:
    """Says "mm-hm" in the pauses of the user's long turns, with ``turn_detection.backchannel``.

    ``language`` returns that of the conversation (primary subtag of RFC 5646); None if the voice does not speak it.

    A murmur is no request, and enters neither history nor usage. The audio made with the latest voice is kept. Audio
    that is made too late for its pause is played in the next one.
    """

    def __init__(self, conversation: Conversation, language: Callable[[SessionConfig], str | None]) -> None:
        self._conversation = conversation
        self._language = language
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
        """Say a murmur ("mm-hm") in the pause at ``audio_ms`` of the turn that began at ``began_ms``, if one is due.

        Whether one is due is decided once the listener has applied its remaining audio, in which the speaker may go on.
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
        language = self._language(config)
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
        """Return whether the turn is in progress, its speaker is silent, nothing is played, and no answer is due."""
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
    """Whether a configuration asks for murmurs and allows them.

    They are not allowed if the server removes its own echo, since the echo of murmurs would stay in the input.
    """
    turns = config.turn_detection
    return (
        turns is not None and turns.backchannel and "audio" in config.modalities and config.input_audio.echo != "server"
    )


def _raw_format(config: SessionConfig) -> AudioFormat:
    """Return the format of the session's output if it is raw, otherwise pcm16 at its rate."""
    audio = config.output_audio.encoded
    return audio if audio.is_raw else AudioFormat(sample_rate=audio.sample_rate)


class _Collected:
    """An OutputWriter that collects the audio of a murmur ("mm-hm")."""

    full = False

    def __init__(self) -> None:
        self._pieces: list[Samples] = []
        self._rate = 0

    def write(self, output: EngineOutput) -> None:
        if isinstance(output, AudioOutput) and sum(map(len, self._pieces)) <= LONGEST_MURMUR_SEC * output.sample_rate:
            self._pieces.append(as_samples(output.samples))
            self._rate = output.sample_rate

    async def drain(self) -> None:
        pass

    def encoded(self, audio: AudioFormat) -> bytes:
        """Return the audio, encoded and lowered by 12 dB; b"" if there is none or it is too long."""
        samples = np.concatenate([*self._pieces, np.zeros(0, np.float32)])
        if not len(samples) or len(samples) > LONGEST_MURMUR_SEC * self._rate:
            return b""
        encoder = AudioEncoder(audio, source_rate=self._rate)
        return encoder.encode(samples * np.float32(MURMURED)) + encoder.flush()


# What an application gives a conversation to tell: results of tools that work meanwhile, and other news.
#
# A Telling waits for the next pause of both sides: nobody speaks, not even perhaps, no request is open, and nothing
# sounds. Then it is a request of its own, which interrupts nothing: the model puts the text into its own words. If that
# answer ends before anything of it was heard, as the user interrupts it, the telling leaves the history and waits
# again. One telling is told at a time.
#
# A tool with ``async: true`` works while the talk goes on. As its call is made, the model is given WORKING as the
# result; the client's result is a Telling.


#: Tellings that may wait in a session, and the bytes of all their texts.
MAX_TELLINGS: Final = 64
MAX_TELLING_BYTES: Final = 1 << 20
#: The pause after which something is told, in seconds from the last sound of either side.
PAUSE_SEC: Final = 0.3
#: How often a telling is tried if its requests fail, and the seconds between two tries.
MAX_TRIES: Final = 3
RETRY_SEC: Final = 5.0
#: The memory that a telling takes besides its text.
_TELLING_BYTES: Final = 512
#: The characters of a call's arguments by which the model recognises the call.
_TITLE_CHARACTERS: Final = 200

#: The result that the model sees of a call to an async tool until the client's result is told.
WORKING: Final = (
    "Still working. The result is not known yet and will come later by itself. "
    "Do not guess it, and do not call the tool again for it. Meanwhile answer whatever the user asks."
)
#: What precedes a fact that the model is to know.
FACT: Final = (
    "[This is not from the user, who does not see it. Know it, and do not speak of it unless it is asked for.]\n"
)
_NEWS: Final = (
    "[This is not from the user, who does not see it. Tell the user the following now, once, in your own words and in "
    "the language of the talk. If it is an instruction, follow it, and do not read it out.]\n"
)
_RESULT: Final = (
    "[This is not from the user, who does not see it. There is news of the work that was begun earlier with {title}. "
    "Tell the user now, once, briefly, in your own words and in the language of the talk. If the talk has moved on "
    "since, say in a few words what it is about. Do not say again that you are looking or that it takes a moment, and "
    "do not begin the same work again.]\n"
)


def _unheeded(*_: str) -> None:
    """Ignore the news about a telling, as nobody asked for it."""


@dataclass(slots=True, eq=False)
class Telling:
    """A text that the assistant is to tell the user: a fact or an instruction, to put into its own words.

    ``about`` is the id of the tool call whose result the text is; None for other news. ``entered`` is called when the
    text has entered the model's context; ``told``, with the id of the request, once some of the answer was heard;
    ``dropped`` if the text will not be told, as the call was withdrawn. Neither ``told`` nor ``dropped`` is called if
    nothing of an answer is heard: the model has nothing to say, its requests fail MAX_TRIES times, or the talk ends.
    """

    text: str
    about: str | None = None
    entered: Callable[[], None] = _unheeded
    told: Callable[[str], None] = _unheeded
    dropped: Callable[[], None] = _unheeded
    #: The client's name for the request that tells it.
    ref: str | None = None
    #: The requests for it that have failed.
    tries: int = 0
    #: Whether a client has cancelled it: then it waits until the user has said something else.
    stopped: bool = False

    @property
    def size(self) -> int:
        """The bytes that the telling is charged with."""
        return len(self.text.encode()) + _TELLING_BYTES

    def stop(self, stopped: bool) -> None:
        """Set whether the telling waits until the user speaks, because a client has cancelled it."""
        self.stopped = stopped

    def fail(self) -> bool:
        """Note that a request for this telling has failed. Returns whether to try again."""
        self.tries += 1
        return self.tries < MAX_TRIES


class SavedTelling(msgspec.Struct, frozen=True):
    """A Telling in a form that can be written to bytes, without its callbacks."""

    text: str
    about: str | None
    tries: int
    stopped: bool
    ref: str | None = None

    @classmethod
    def of(cls, telling: Telling) -> SavedTelling:
        """Return the saved form of ``telling``."""
        return cls(telling.text, telling.about, telling.tries, telling.stopped, telling.ref)

    def restored(self) -> Telling:
        """Return the telling."""
        return Telling(self.text, self.about, ref=self.ref, tries=self.tries, stopped=self.stopped)


class SavedTellings(msgspec.Struct, kw_only=True):
    """Tellings in a form that can be written to bytes.

    ``current`` is the telling that the request ``request_id`` tells; ``calls`` are from ``ToolResults.async_calls``.
    """

    waiting: list[SavedTelling] = []
    current: SavedTelling | None = None
    request_id: str | None = None
    due: float | None = None
    not_before: float = 0.0
    titles: dict[str, str] = {}
    calls: tuple[list[str], list[str], list[str]] = msgspec.field(default_factory=lambda: ([], [], []))


class Tellings:
    """The queue of a conversation's tellings, first in, first out.

    A telling is a text, such as the result of an async tool or news, that the model puts into its own words at the next
    pause.
    """

    def __init__(self, conversation: Conversation, results: ToolResults) -> None:
        self._conversation = conversation
        self._results = results
        results.watch(self._is_async, self._result)
        self._share = Share(conversation.account)
        self._waiting: list[Telling] = []
        #: The telling that a request tells, and the id of that request.
        self._current: Telling | None = None
        self._request_id: str | None = None
        #: Whether the model has the text of the current one.
        self._entered = False
        #: When the pause is long enough; None while anybody speaks, or an answer is due.
        self._due: float | None = None
        self._not_before = 0.0
        #: The name and arguments of each call, by call id.
        self._titles: dict[str, str] = {}

    def put(self, telling: Telling) -> None:
        """Queue a telling. If it is about a call whose request was cancelled, it is dropped.

        Raises EngineOverloaded if too many tellings wait.
        """
        if telling.about is not None and self._results.withdrew(telling.about):
            telling.dropped()
            return
        size = self._share.size + telling.size
        if len(self._waiting) >= MAX_TELLINGS or size > MAX_TELLING_BYTES:
            raise EngineOverloaded("too much waits to be told in this session", retry_after_ms=1000)
        self._share.resize(size)
        self._waiting.append(telling)

    def know(self, text: str, role: str = "user") -> None:
        """Put a message that belongs to no request into the history."""
        self._conversation.ledger.place([Message(role, text)], item_id=new_id(PLACED))
        self._conversation.ledger.weigh()

    def close(self) -> None:
        """Drop all tellings, without a call of ``dropped``, as the conversation ends. Idempotent."""
        self._waiting.clear()
        self._current = None
        self._share.resize(0)

    # async tools

    def _is_async(self, call_id: str) -> bool:
        """Return whether ``call_id`` is a call to an async tool in an answer that is still being made."""
        return any(call.id == call_id for one in self._conversation.queue.requests for call in async_calls(one))

    def _result(self, call_id: str, text: str, ref: str | None) -> None:
        self._conversation.tell(Telling(text, about=call_id, ref=ref))

    def note_calls(self, request: Request) -> list[ToolCall]:
        """Note that an answer has ended. Returns its calls to async tools, whose results are awaited from now on.

        The history gets WORKING as the result of each call.
        """
        found = [one for one in async_calls(request) if one.is_whole and not self._results.withdrew(one.id)]
        for call in found:
            arguments = call.arguments
            shown = arguments if len(arguments) <= _TITLE_CHARACTERS else f"{arguments[:_TITLE_CHARACTERS]}…"
            self._titles[call.id] = f"{call.name}({shown})"
            self._results.work(call.id)
            working = Message("tool", WORKING, tool_call_id=call.id)
            self._conversation.ledger.place([working], item_id=new_id(PLACED))
        keep_newest(self._titles, MAX_CALLS)
        return found

    def withdraw(self, calls: Iterable[ToolCall]) -> None:
        """Drop the waiting tellings about these calls, as their request was cancelled."""
        ids = {call.id for call in calls}
        for dropped in [one for one in self._waiting if one.about in ids]:
            self._waiting.remove(dropped)
            self._release(dropped)
            dropped.dropped()

    # when

    def note_quiet(self, since: float | None, now: float, *, by_user: bool) -> None:
        """Note since when it has been quiet; None while anybody speaks or an answer is due.

        ``by_user``: the user speaks.
        """
        self._look(now)
        if by_user:
            for one in self._waiting:
                one.stop(False)
        if since is None:
            self._due = None
        elif self._due is None or since > now:
            self._due = since + PAUSE_SEC
        else:  # it may be longer ago; if not, a playback was cut off
            self._due = min(self._due, now + PAUSE_SEC)

    def cancelled(self, request_id: str | None, named: Request | None) -> None:
        """Note a client's cancel before it takes effect: a telling that it stops waits for the user's next turn.

        ``named`` is the unfinished request that the cancel means; None without one.
        """
        meant = request_id if named is None else named.request_id
        if self._current is not None and meant in (None, self._request_id):
            self._current.stop(True)

    def get_timer(self) -> float | None:
        """Return when ``speak`` may have something to do; None if that does not depend on time."""
        if self._due is None:
            return None
        if self._current is not None:
            return self._due
        return None if self._next() is None else max(self._due, self._not_before)

    def _next(self) -> Telling | None:
        return next((one for one in self._waiting if not one.stopped), None)

    def tells(self, request: Request) -> bool:
        """Return whether a request is the request of a telling."""
        if self._current is not None and self._request_id is None:  # it is just opening, and nothing else is open
            return True
        return request.tells

    def speak(self, now: float) -> bool:
        """Open the request for the next telling, if it is due. Returns whether it was."""
        self._look(now)
        when = self.get_timer()
        if when is None or now < when or self._current is not None:
            return False
        conversation, telling = self._conversation, self._next()
        assert telling is not None
        self._waiting.remove(telling)
        self._current, self._entered = telling, False
        chunk = InputChunk(Modality.TEXT, self._prompt(telling).encode(), ref=telling.ref)
        config = _free_choice(conversation.configuration.effective)
        self._request_id = conversation.respond([chunk], config, trigger=StartTrigger.TELLING)
        self._look(now)  # it may have been refused
        return True

    def _prompt(self, telling: Telling) -> str:
        if telling.about is None:
            return _NEWS + telling.text
        return _RESULT.format(title=self._titles.get(telling.about, "a tool")) + telling.text

    # what becomes of it

    def _look(self, now: float) -> None:
        """Check whether the current telling has entered the model's context, was heard, or must wait again."""
        telling, request_id = self._current, self._request_id
        if telling is None or request_id is None:
            return
        conversation = self._conversation
        request, entry = conversation.queue.find(request_id), conversation.ledger.find(request_id)
        if not self._entered and (request is None or request.state not in (RequestState.OPEN, RequestState.WAITING)):
            self._entered = entry is not None and entry.input_kept
            if self._entered:
                telling.entered()
        if entry is not None and conversation.ledger.has_heard(entry, now):
            self._over(telling)
            telling.told(request_id)
        elif request is not None:
            return
        elif entry is None or not entry.input_kept:
            self._failed(telling, now)
        elif entry.cancelled or entry.cut_ms is not None:
            conversation.ledger.remove(request_id)
            self._wait_again(telling)
        elif not entry.sent_ms or not conversation.ledger.playing(now):
            self._over(telling)  # the model had nothing to say

    def _over(self, telling: Telling) -> None:
        self._current = self._request_id = None
        self._release(telling)

    def _wait_again(self, telling: Telling) -> None:
        self._current = self._request_id = None
        self._waiting.insert(0, telling)

    def _failed(self, telling: Telling, now: float) -> None:
        """Queue a telling again after its request failed; after MAX_TRIES put its text into the history unspoken."""
        if telling.fail():
            self._not_before = now + RETRY_SEC
            self._wait_again(telling)
            return
        self.know(self._prompt(telling))
        if not self._entered:
            telling.entered()
        self._over(telling)

    def _release(self, telling: Telling) -> None:
        self._share.resize(max(0, self._share.size - telling.size))

    # saved

    def saved(self) -> SavedTellings:
        """Return the saved form of all tellings."""
        return SavedTellings(
            waiting=list(map(SavedTelling.of, self._waiting)),
            current=None if self._current is None else SavedTelling.of(self._current),
            request_id=self._request_id,
            due=self._due,
            not_before=self._not_before,
            titles=self._titles,
            calls=self._results.async_calls(),
        )

    def restore(self, saved: SavedTellings, *, later: float) -> None:
        """Take over saved tellings. The requests of the queue must be restored before.

        ``later`` is how many seconds the clock of this process is ahead of the clock of the saved times.
        """
        self._due = None if saved.due is None else saved.due + later
        self._not_before = saved.not_before + later
        self._waiting = [one.restored() for one in saved.waiting]
        self._current = None if saved.current is None else saved.current.restored()
        self._request_id, self._titles = saved.request_id, saved.titles
        self._results.go_on(*saved.calls)
        held = [*self._waiting, *(() if self._current is None else (self._current,))]
        self._share.force(sum(one.size for one in held))


def async_calls(request: Request) -> list[ToolCall]:
    """Return the calls of a request's answer to tools with ``async: true``."""
    if not request.tool_calls:
        return []
    names = {tool["function"]["name"] for tool in request.config.tools if tool.get("async")}
    return [call for call in request.tool_calls if call.name in names]


def _free_choice(config: SessionConfig) -> SessionConfig:
    """Return the configuration for a telling: a chat, also where turns are only transcribed; no tool call is forced."""
    free = config.tool_choice in (None, "none", "auto")
    return replace(config, task=Task.CHAT, tool_choice=config.tool_choice if free else "auto")
