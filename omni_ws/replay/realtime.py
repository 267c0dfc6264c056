"""Follows recorded sessions of the Realtime API, so that they can be replayed like native ones."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import orjson

from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.replay.answers import Answers, NativeAnswers, ReplayedAnswer, decoded, parsed
from omni_ws.replay.native import WebSocketKind

#: A place that has the same event in the recording and in the replay.
_Place: TypeAlias = tuple[str | int, ...]

_ENCODINGS: Final = {
    "audio/pcm": (AudioEncoding.PCM16, 24_000),
    "audio/pcmu": (AudioEncoding.PCMU, 8000),
    "audio/pcma": (AudioEncoding.PCMA, 8000),
}
#: Fields of client events that name what the server has given an id.
_ID_FIELDS: Final = frozenset({"id", "item_id", "previous_item_id", "response_id", "call_id"})
#: Events that stop a response that is in progress.
_STOPPING: Final = frozenset({"response.cancel", "output_audio_buffer.clear", "conversation.item.truncate"})


class RealtimeAnswers(NativeAnswers):
    """Follows both directions of a session, event by event, in order. A response is an answer."""

    def __init__(self) -> None:
        super().__init__()
        #: The ids that the server gave.
        self.ids: dict[_Place, str] = {}
        #: The item of speech that the next response answers.
        self._asked: str | None = None
        self._answer_to: dict[str, ReplayedAnswer] = {}
        #: By item, what was heard and is not part of an answer yet.
        self._heard: dict[str, str] = {}

    def asked(self, at: float, message: bytes | str) -> None:
        if parsed(message).get("type") in ("input_audio_buffer.commit", "response.create"):
            self._ends.append(at)

    def heard(self, at: float, message: bytes | str) -> None:
        event = parsed(message)
        match event.get("type"):
            case "session.created":
                self.greetings += 1
                self._take_session(event["session"])
            case "session.updated":
                self.configured += 1
                self._take_session(event["session"])
            case "input_audio_buffer.speech_started":
                self._name_speech(event["item_id"])
            case "input_audio_buffer.speech_stopped":
                self._ends.append(at)
            case "input_audio_buffer.committed":
                self._name_speech(event["item_id"])
                self._asked = event["item_id"]
            case "conversation.item.input_audio_transcription.completed":
                self.finals += 1
                self._transcribed(event["item_id"], event["transcript"])
            case "conversation.item.input_audio_transcription.failed":
                self.finals += 1
            case "transcription.done":  # vLLM's dialect
                self.finals += 1
                self.found.answers.append(ReplayedAnswer("", transcript=event["text"], finish_reason="completed"))
            case "error":
                error = event["error"]
                self.found.errors.append(str(error.get("code") if isinstance(error, dict) else event.get("code")))
            case str(kind) if kind.startswith("response."):
                self._respond(at, kind, event)

    def finished(self) -> Answers:
        """All answers; what was heard and never answered counts as one."""
        for item_id, transcript in self._heard.items():
            self.found.answers.append(ReplayedAnswer(item_id, transcript=transcript, finish_reason="completed"))
        self._heard.clear()
        return self.found

    def _take_session(self, session: dict[str, Any]) -> None:
        output = session.get("audio", {}).get("output", {}).get("format")
        if output is not None:
            encoding, rate = _ENCODINGS[output["type"]]
            self._format = AudioFormat(encoding, output.get("rate", rate), 1)

    def _name_speech(self, item_id: str) -> None:
        if item_id not in self.ids.values():
            self.ids["speech", sum(place[0] == "speech" for place in self.ids)] = item_id

    def _transcribed(self, item_id: str, transcript: str) -> None:
        answer = self._answer_to.get(item_id)
        if answer is None:
            self._heard[item_id] = transcript
        else:
            answer.transcript = transcript

    def _respond(self, at: float, kind: str, event: dict[str, Any]) -> None:
        if kind == "response.created":
            self._begin(at, event["response"]["id"])
            return
        answer = self._answer(event["response"]["id"] if kind == "response.done" else event["response_id"])
        match kind:
            case "response.output_item.added":
                self.ids["output", self._place(answer), event["output_index"]] = event["item"]["id"]
            case "response.output_text.delta" | "response.output_audio_transcript.delta":
                answer.output(at)
                answer.text += event["delta"]
            case "response.output_audio.delta":
                self._hear_audio(at, answer, decoded(event["delta"]), self._format)
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                call = event["item"]
                self.ids["call", self._place(answer), event["output_index"]] = call["call_id"]
                answer.output(at)
                answer.tool_calls += f"{call['name']}{call['arguments']}"
            case "response.done":
                self._end(at, answer, event["response"])

    def _begin(self, at: float, response_id: str) -> None:
        self.started += 1
        self.running = answer = self._answer(response_id)
        answer.asked_at = self._ends[-1] if self._ends else at
        self.ids["response", self._place(answer)] = response_id
        if self._asked is not None:
            self._answer_to[self._asked] = answer
            answer.transcript = self._heard.pop(self._asked, "")
            self._asked = None

    def _end(self, at: float, answer: ReplayedAnswer, response: dict[str, Any]) -> None:
        self.finals += 1
        answer.final_at = at
        answer.finish_reason = "error" if response["status"] == "failed" else response["status"]
        if (error := (response.get("status_details") or {}).get("error")) is not None:
            answer.errors.append(str(error.get("code")))
        if answer is self.running:
            self.running = None

    def _place(self, answer: ReplayedAnswer) -> int:
        return self.found.answers.index(answer)


def _classified(message: bytes | str, *, ended: bool) -> tuple[bool, bool]:
    """See WebSocketKind."""
    kind = parsed(message).get("type")
    if kind == "input_audio_buffer.append":
        return False, ended
    if kind in ("input_audio_buffer.commit", "response.create"):
        return True, False
    return (True, True) if kind in _STOPPING else (ended, False)


def _rewritten(message: bytes | str, then: NativeAnswers, now: NativeAnswers) -> bytes | str | None:
    """See WebSocketKind."""
    assert isinstance(then, RealtimeAnswers)
    assert isinstance(now, RealtimeAnswers)
    event = parsed(message)
    if event.get("type") == "input_audio_buffer.append":
        return message
    current = {then.ids[place]: item_id for place, item_id in now.ids.items() if place in then.ids}
    renamed = _renamed(event, current)
    return message if renamed == event else orjson.dumps(renamed).decode()


def _renamed(value: Any, current: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(one, current) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: current.get(one, one) if name in _ID_FIELDS and isinstance(one, str) else _renamed(one, current)
        for name, one in value.items()
    }


REALTIME: Final = WebSocketKind(RealtimeAnswers, _classified, _rewritten)
