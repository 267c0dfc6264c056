"""Speaks unasked in a pause: tells news, and that a tool still works, and asks whether the user is still there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from omni_ws.core.chunks import InputChunk, StartTrigger, Task, ToolCall
from omni_ws.core.json_values import primary_subtag
from omni_ws.service.conversation.murmurs import Murmurs
from omni_ws.service.conversation.remarks import Remarks
from omni_ws.service.conversation.request import Request
from omni_ws.service.conversation.telling import Tellings
from omni_ws.service.conversation.tool_results import ToolResults
from omni_ws.wire.session_config import SessionConfig, spoken_language

if TYPE_CHECKING:
    from omni_ws.service.conversation.conversation import Conversation


class Unasked:
    """Tells Remarks what goes on in a conversation, and has the conversation say what they find is due."""

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
        #: Whether only async tools work, so that no filler comes after the first one.
        self._one_filler = False

    def takes(self, result: InputChunk) -> bool:
        """Return whether the result of a tool is that of an async one, which is told now. Raises EngineOverloaded."""
        return self._results.take_late(result)

    def note_quiet(self, now: float) -> None:
        """Note whether anybody speaks, or an answer is due, and if not, since when."""
        conversation = self._conversation
        summaries = conversation.limits.summaries
        if conversation.stream.single_request:
            (summaries.disturb if conversation.queue.requests else summaries.note_quiet)(conversation)
            return
        receiving = conversation.receiving
        due = [one for one in conversation.queue.requests if one is not receiving or not one.session.only_results]
        spoken = conversation.spoken
        speaking = spoken.current is not None
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
