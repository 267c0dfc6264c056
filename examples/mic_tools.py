"""Tools of the microphone client, which a model may call while people talk with it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from mic_display import JsonDisplay
from tool_client import LOCAL_TIME, MAX_ROUNDS, RESULTS, run_tool

from omni_ws.client import ClientSession, Event, SpeechStarted
from omni_ws.client.events import AnswerCollector
from omni_ws.core.chunks import FinishReason
from omni_ws.errors import SessionConflict

TOOLS: Final = (LOCAL_TIME,)


class ToolRunner:
    """Runs the tools that answers call, and sends their results, which starts the next answer."""

    def __init__(self, session: ClientSession, display: JsonDisplay) -> None:
        self._session = session
        self._display = display
        self._answers = AnswerCollector()
        #: Whether the server names what it hears, and so ends a request that consists of results by itself.
        self._names = False
        #: Answers in a row that called a tool.
        self._rounds = 0

    async def offer(self) -> None:
        """Tells the model of the tools, if the server's model can call any and has no others."""
        config = self._session.config
        if self._session.created.capabilities.tools and not (config and config.tools):
            await self._session.configure(tools=[*TOOLS])

    async def take(self, event: Event) -> bool:
        """Takes the next event of the session. Returns whether another answer follows, to the results of tools."""
        self._answers.add(event)
        self._names = self._names or (isinstance(event, SpeechStarted) and event.turn_id is not None)
        answer = self._answers.take(None)
        if answer is None:
            return False
        if answer.finish_reason is not FinishReason.TOOL_CALLS or not answer.tool_calls:
            self._rounds = 0
            return False
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self._rounds = 0
            self._display.show("note", message=f"the model called tools {MAX_ROUNDS} times in a row, which is enough")
            return False
        for call in answer.tool_calls:
            result = run_tool(call, datetime.now(UTC))
            self._display.show("tool", name=call.name, arguments=call.arguments, result=result)
            # Where the microphone is open, an end would also end what is being said.
            end = call is answer.tool_calls[-1] and not self._names
            try:
                await self._session.send_tool_result(call.id, result, end=end, ref=RESULTS)
            except SessionConflict as error:
                self._display.show("note", message=error.message)
                return False
        return True
