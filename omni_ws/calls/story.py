"""Story: the turns of a call, with their texts and times, from the frames in which the session told of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

#: Characters of the text of one answer, or of one turn of the user, that a story keeps, and turns that it keeps.
MAX_TEXT: Final = 1 << 18
MAX_TURNS: Final = 10_000
#: Words of one turn that it keeps.
MAX_WORDS: Final = 1 << 14


class CallTurn:
    """One request with its answer. Times are milliseconds of the call; None if they are not known."""

    def __init__(self, request_id: str, at: float) -> None:
        self.request_id = request_id
        self.turn_id: str | None = None
        #: When the request was first told of, and when the work on it started.
        self.opened_at = at
        self.started_at: float | None = None
        #: What started the request, and the number of the chunk that did, where one did.
        self.trigger: str | None = None
        self.asked_by: int | None = None
        #: Where in all sound of the user (ms) the input of the request begins.
        self.input_from_ms = 0.0
        #: Places there where the speech began and stopped, and when the session said that it stopped.
        self.speech: list[float | None] = [None, None]
        self.stopped_at: float | None = None
        self.typed = ""
        self.heard = ""
        self.heard_words: list[dict[str, Any]] = []
        self.said = ""
        self.said_words: list[dict[str, Any]] = []
        self.tools: dict[int, dict[str, Any]] = {}
        self.first_text_at: float | None = None
        self.first_sound_at: float | None = None
        self.last_sound_at: float | None = None
        self.ended_at: float | None = None
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.times: dict[str, Any] = {}
        #: How far the session knew the answer to be played, and when.
        self.played: list[tuple[float, float]] = []

    def name(self, turn_id: str, speech: Sequence[float | None], stopped_at: float | None) -> None:
        """Note the turn of the session, with what was told of its speech before the request was."""
        self.turn_id = turn_id
        self.speech = [was if told is None else told for was, told in zip(self.speech, speech, strict=True)]
        self.stopped_at = self.stopped_at if stopped_at is None else stopped_at

    def start(self, at: float, frame: Mapping[str, Any], *, typed: str, input_from_ms: float) -> None:
        self.started_at = at
        self.typed = typed
        number, trigger = frame.get("sequence_id"), frame.get("trigger")
        self.trigger = trigger if isinstance(trigger, str) else None
        self.asked_by = number if isinstance(number, int) else None
        self.input_from_ms = input_from_ms

    def hear(self, at: float, index: int, audio_ms: float) -> None:
        """Note where speech began (index 0), of which the first time counts, or stopped (index 1)."""
        if index or self.speech[0] is None:
            self.speech[index] = audio_ms
        self.stopped_at = at if index else self.stopped_at

    def fail(self, error: dict[str, Any]) -> None:
        self.error = error

    def tell(self, at: float, frame: Mapping[str, Any]) -> None:
        """Note a piece of the output."""
        words = frame.get("words") if isinstance(frame.get("words"), list) else []
        match frame.get("modality"):
            case "text":
                self.said = _joined(self.said, frame.get("text"))
                self.first_text_at = at if self.first_text_at is None else self.first_text_at
            case "audio":
                self.first_sound_at = at if self.first_sound_at is None else self.first_sound_at
                self.last_sound_at = at
                known = self.said_words[-1]["start_ms"] if self.said_words else -1
                # After an answer was held, words are told again.
                told = [one for one in _timed_words(words) if one["start_ms"] > known]
                self.said_words += told[: _room(self.said_words)]
            case "transcript" if not frame.get("interim"):
                self.heard = _joined(self.heard, frame.get("text"))
                self.heard_words += _timed_words(words)[: _room(self.heard_words)]
            case "tool_call":
                self._called(frame)
        if frame.get("final"):
            self.ended_at = at
            self.finish_reason = frame.get("finish_reason")
            self.usage = frame.get("usage")
            if isinstance(times := frame.get("times"), dict):
                self.times = times

    def _called(self, frame: Mapping[str, Any]) -> None:
        index = frame.get("index")
        if not isinstance(index, int) or (index not in self.tools and len(self.tools) >= MAX_TURNS):
            return
        call = self.tools.setdefault(index, {"id": None, "name": "", "arguments": ""})
        call["id"] = frame.get("id") or call["id"]
        call["name"] = frame.get("name") or call["name"]
        call["arguments"] = _joined(call["arguments"], frame.get("arguments"))

    def input_begins_ms(self, padding_ms: float) -> float:
        """Return where in all sound of the user the time line of the request's input begins."""
        return self.input_from_ms if self.speech[0] is None else max(0.0, self.speech[0] - padding_ms)

    def time_of(self, position_ms: float) -> float | None:
        """Return when the sound at this position of the answer was played, as far as the session knew."""
        index = bisect_right(self.played, position_ms, key=lambda one: one[1])
        if index == len(self.played):
            return None
        at, played_ms = self.played[index]
        return at - (played_ms - position_ms)


class Story:
    """Collects frames of the native WebSocket, in their order; ``turns`` has what they tell."""

    def __init__(self) -> None:
        self.turns: dict[str, CallTurn] = {}
        #: The request whose sound was told of last.
        self.sounding: str | None = None
        self.errors: list[dict[str, Any]] = []
        #: Turns that were left out, beyond MAX_TURNS.
        self.left_out = 0
        #: Where in all sound of the user the next request begins if nothing else tells.
        self._input_from_ms = 0.0
        #: What precedes speech in its turn.
        self.padding_ms = 300.0
        #: By how much later what the session takes for played is heard.
        self.later_ms = 0.0
        self._typed = ""
        #: Of speech by its turn, before its request is known: where it began and stopped, and when that was told.
        self._speech: dict[str, list[float | None]] = {}
        self._stopped: dict[str, float] = {}
        self._kinds: Mapping[str, Callable[[float, Mapping[str, Any]], None]] = {
            "response_started": self._started,
            "output_chunk": self._output,
            "speech_started": partial(self._spoken, 0),
            "speech_confirmed": partial(self._spoken, 0),
            "speech_stopped": partial(self._spoken, 1),
            "error": self._failed,
        }

    def type(self, text: str) -> None:
        """Note text of the user, which belongs to the next request."""
        self._typed = _joined(self._typed, text)

    def end_input(self, audio_ms: float) -> None:
        """Note that the user's sound behind ``audio_ms`` of all belongs to the next request."""
        self._input_from_ms = audio_ms

    def tell(self, at: float, frame: Mapping[str, Any]) -> None:
        """Note a frame of the session. Frames that tell nothing of turns, and broken ones, are ignored."""
        take = self._kinds.get(str(frame.get("type")))
        if take is not None:
            take(at, frame)

    def play(self, request_id: str, at: float, played_ms: float) -> None:
        """Note how much of an answer was played."""
        if (turn := self.turns.get(request_id)) is not None and (not turn.played or played_ms > turn.played[-1][1]):
            turn.played.append((at + self.later_ms, played_ms))

    def _turn(self, at: float, request_id: object) -> CallTurn | None:
        if not isinstance(request_id, str):
            return None
        if request_id not in self.turns:
            if len(self.turns) >= MAX_TURNS:
                self.left_out += 1
                return None
            self.turns[request_id] = CallTurn(request_id, at)
        return self.turns[request_id]

    def _named(self, turn: CallTurn, frame: Mapping[str, Any]) -> None:
        """Note the turn that a frame names, with what is known of its speech."""
        turn_id = frame.get("turn_id")
        if isinstance(turn_id, str) and turn.turn_id is None:
            turn.name(turn_id, self._speech.pop(turn_id, (None, None)), self._stopped.pop(turn_id, None))

    def _started(self, at: float, frame: Mapping[str, Any]) -> None:
        if (turn := self._turn(at, frame.get("request_id"))) is not None:
            turn.start(at, frame, typed=self._typed, input_from_ms=self._input_from_ms)
            self._typed = ""
            self._named(turn, frame)

    def _spoken(self, index: int, at: float, frame: Mapping[str, Any]) -> None:
        """Note where speech began (index 0) or stopped (index 1)."""
        audio_ms, turn_id = frame.get("audio_ms"), frame.get("turn_id")
        if not isinstance(audio_ms, int | float):
            return
        turn = self._turn(at, frame.get("request_id"))
        if turn is not None:
            self._named(turn, frame)
            turn.hear(at, index, float(audio_ms))
        elif isinstance(turn_id, str) and len(self._speech) < MAX_TURNS:
            self._speech.setdefault(turn_id, [None, None])[index] = float(audio_ms)
            if index:
                self._stopped[turn_id] = at

    def _failed(self, at: float, frame: Mapping[str, Any]) -> None:
        error = frame.get("error")
        if not isinstance(error, dict):
            return
        if (turn := self.turns.get(str(error.get("request_id")))) is not None:
            turn.fail(error)
        elif len(self.errors) < MAX_TURNS:
            self.errors.append({"at_ms": at, **error})

    def _output(self, at: float, frame: Mapping[str, Any]) -> None:
        turn = self._turn(at, frame.get("request_id"))
        if turn is None:
            return
        self._named(turn, frame)
        if frame.get("modality") == "audio":
            self.sounding = turn.request_id
        turn.tell(at, frame)


def _joined(text: str, more: object) -> str:
    return text + more[: MAX_TEXT - len(text)] if isinstance(more, str) else text


def _room(words: list[dict[str, Any]]) -> int:
    return max(0, MAX_WORDS - len(words))


def _timed_words(words: Any) -> list[dict[str, Any]]:
    """Return those of ``words`` that have a text and times."""
    return [
        {"text": str(one.get("text", "")), "start_ms": one["start_ms"], "end_ms": one["end_ms"]}
        for one in words
        if isinstance(one, dict)
        and isinstance(one.get("start_ms"), int | float)
        and isinstance(one.get("end_ms"), int | float)
    ]
