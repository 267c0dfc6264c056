"""Responses of chat, speech, completions and transcriptions.

No I/O: the classes take the outputs of a session and return JSON objects, in the order in which these are sent. Each
route has a class for a stream, and one that accumulates a whole response.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from omni_ws.core.chunks import (
    FINISH_REASON_WARNING,
    FinalChunk,
    FinishReason,
    HeardSegment,
    Hearing,
    OutputChunk,
    OutputModality,
    TokenLogprob,
    ToolCall,
    ToolCallFragment,
    Usage,
    Word,
    heard_language,
)
from omni_ws.wire.openai_requests import TranscriptionRequest

# ``/v1/chat/completions``: the chunks of a stream, and whole ``chat.completion`` objects.

#: The seconds from ``created`` to ``expires_at`` of audio. For so long the audio's id may stand for its transcript in
#: later requests; the audio itself is not kept.
AUDIO_EXPIRES_SEC: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """The contents of the response to a chat or a completion request, besides the answers.

    ``choices`` is the number of answers, over all prompts together. ``created`` is in seconds of Unix time.
    ``include_usage`` adds a chunk with the usage after the final chunks of all choices; ``usage_on_final_chunk`` puts
    the usage on the last of these final chunks. ``include_times`` puts the times of the answer's steps on the last
    final chunk, or into the whole response. ``input_transcript`` includes the recognised text of the input.
    """

    completion_id: str
    created: int
    model: str
    wants_text: bool = True
    wants_audio: bool = False
    include_usage: bool = False
    usage_on_final_chunk: bool = False
    include_times: bool = False
    input_transcript: bool = True
    choices: int = 1
    logprobs: bool = False

    def object(self, kind: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """Return the JSON object of a whole response, or of a chunk; ``kind`` is its field ``object``."""
        head = {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **extra}


class ChatStream:
    """Encodes a streamed chat completion as chunks.

    The order: a chunk with the role, the chunks of the outputs, a chunk with the finish reason, and a chunk with the
    usage if requested. With several choices, there is a role chunk and a finish chunk for each, by ascending index.
    ``keep_spoken`` is called with the transcript of a spoken answer before the chunks that end the stream.
    """

    def __init__(self, options: ResponseOptions, *, keep_spoken: Callable[[str], None] | None = None) -> None:
        self._options = options
        self._keep_spoken = keep_spoken
        self._role_sent = False
        self._audio_sent = False
        #: The text of the answer that the next audio carries as its transcript.
        self._unspoken = ""
        self._spoken: list[str] = []
        self._audio = Base64Stream()
        #: The JSON of a text delta before and after the text. Most chunks are text, and only the text differs.
        self._before_text, _, self._behind_text = orjson.dumps(self._delta({"content": ""})).rpartition(b'""')

    def output(self, chunk: OutputChunk) -> Iterable[dict[str, Any] | bytes]:
        """Return the chunks for an output, each as a JSON object or as its encoded bytes; none if it is not wanted."""
        if self._role_sent and chunk.modality is OutputModality.TEXT and not self._options.wants_audio:
            return (self._content(chunk),) if self._options.wants_text else ()
        return self._outputs(chunk)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the chunks that end the stream."""
        if self._keep_spoken is not None:
            self._keep_spoken("".join(self._spoken))
        yield from self._role()
        if (data := self._audio.finish()) or self._unspoken:
            yield self._audio_delta({"data": data} if data else {})
        if self._audio_sent:
            yield self._delta({"audio": {"expires_at": self._options.created + AUDIO_EXPIRES_SEC}})
        usage = usage_object(chunk.usage)
        for index, reason in enumerate(finish_reasons(chunk, self._options.choices)):
            last = index == self._options.choices - 1
            extra = _extra(chunk, self._options, usage) if last else {}
            cited = annotation_objects(chunk, index)
            yield self._delta({"annotations": cited} if cited else {}, index=index, finish_reason=reason, **extra)
        if self._options.include_usage and not self._options.usage_on_final_chunk:
            yield self._chunk([], usage=usage)

    def _outputs(self, chunk: OutputChunk) -> Iterator[dict[str, Any] | bytes]:
        if chunk.modality is OutputModality.TRANSCRIPT and not self._options.input_transcript:
            return
        yield from self._role()
        match chunk.modality:
            case OutputModality.TEXT:
                if self._options.wants_audio:
                    self._unspoken += chunk.text
                    self._spoken.append(chunk.text)
                if self._options.wants_text:
                    yield self._content(chunk)
            case OutputModality.THOUGHT:
                yield self._delta({"reasoning_content": chunk.text}, index=chunk.choice)
            case OutputModality.TRANSCRIPT:
                yield self._chunk([], input_transcript=transcript_object(chunk))
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                for call in _tool_call_deltas(chunk.tool_call):
                    yield self._delta({"tool_calls": [call]}, index=chunk.choice)
            case OutputModality.AUDIO:
                if data := self._audio.feed(chunk.payload):
                    yield self._audio_delta({"data": data})

    def _role(self) -> Iterator[dict[str, Any]]:
        if not self._role_sent:
            self._role_sent = True
            for index in range(self._options.choices):
                yield self._delta({"role": "assistant"}, index=index)

    def _content(self, chunk: OutputChunk) -> dict[str, Any] | bytes:
        if chunk.choice == 0 and not self._options.logprobs and not chunk.refusal:
            return b"%b%b%b" % (self._before_text, orjson.dumps(chunk.text), self._behind_text)
        name = "refusal" if chunk.refusal else "content"
        choice = {"index": chunk.choice, "delta": {name: chunk.text}, "finish_reason": None}
        if self._options.logprobs:
            choice["logprobs"] = logprobs_object(chunk.logprobs)
        return self._chunk([choice])

    def _audio_delta(self, fields: dict[str, Any]) -> dict[str, Any]:
        # SDKs concatenate the strings of all deltas: the ID may occur only once, and base64 padding only at the very
        # end.
        head = {} if self._audio_sent else {"id": audio_id(self._options)}
        self._audio_sent = True
        spoken, self._unspoken = self._unspoken, ""
        return self._delta({"audio": {**head, **fields, **({"transcript": spoken} if spoken else {})}})

    def _delta(
        self, delta: dict[str, Any], *, index: int = 0, finish_reason: str | None = None, **extra: Any
    ) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish_reason}], **extra)

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return self._options.object("chat.completion.chunk", choices, **extra)


def _tool_call_deltas(call: ToolCallFragment) -> Iterator[dict[str, Any]]:
    """Yield a delta with the ID, the name and empty arguments, and then a delta with the arguments.

    SDKs concatenate the strings of all deltas, so ID and name must occur only once.
    """
    if call.id is not None or call.name is not None:
        head: dict[str, Any] = {"index": call.index}
        if call.id is not None:
            head |= {"id": call.id, "type": "function"}
        name = {} if call.name is None else {"name": call.name}
        yield {**head, "function": {**name, "arguments": ""}}
    if call.arguments:
        yield {"index": call.index, "function": {"arguments": call.arguments}}


class _Choice:
    """One choice of a chat completion, accumulated from its outputs."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._thought: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, ToolCall] = {}
        self._arguments: dict[int, list[str]] = {}

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def spoken(self) -> str:
        return self.text + "".join(self._refusal)

    def add_text(self, chunk: OutputChunk) -> None:
        (self._refusal if chunk.refusal else self._text).append(chunk.text)
        self._logprobs += chunk.logprobs

    def add_thought(self, text: str) -> None:
        self._thought.append(text)

    def add_call(self, fragment: ToolCallFragment) -> None:
        known = self._calls.get(fragment.index) or ToolCall("", "", "")
        self._calls[fragment.index] = ToolCall(fragment.id or known.id, fragment.name or known.name, "")
        self._arguments.setdefault(fragment.index, []).append(fragment.arguments)

    def message(self, *, wants_text: bool) -> dict[str, Any]:
        text, refusal = self.text, "".join(self._refusal)
        has_text = wants_text and not ((self._calls or refusal) and not text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if has_text else None,
            "refusal": refusal if wants_text and refusal else None,
        }
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(self._arguments[index])},
                }
                for index, call in sorted(self._calls.items())
            ]
        return message

    def logprobs(self) -> dict[str, Any]:
        return logprobs_object(self._logprobs)


class ChatCompletion:
    """Accumulates a whole ``chat.completion`` from outputs."""

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._choices = [_Choice() for _ in range(options.choices)]
        self._transcript: list[str] = []
        self._language: str | None = None
        self._audio = bytearray()

    def output(self, chunk: OutputChunk) -> None:
        """Add an output."""
        match chunk.modality:
            case OutputModality.TEXT:
                self._choices[chunk.choice].add_text(chunk)
            case OutputModality.THOUGHT:
                self._choices[chunk.choice].add_thought(chunk.text)
            case OutputModality.TOOL_CALL if chunk.tool_call is not None:
                self._choices[chunk.choice].add_call(chunk.tool_call)
            case OutputModality.AUDIO:
                self._audio += chunk.payload
            case OutputModality.TRANSCRIPT if not chunk.interim:
                self._transcript.append(chunk.text)
                self._language = self._language if chunk.hearing is None else heard_language(chunk.hearing)

    def final(self, chunk: FinalChunk, *, audio: bytes | None = None) -> dict[str, Any]:
        """Return the response. ``audio``, a file whose header has the true length, replaces the accumulated audio."""
        options = self._options
        reasons = finish_reasons(chunk, options.choices)
        choices = [self._choice(index, reason) for index, reason in enumerate(reasons)]
        for index, choice in enumerate(choices):
            if cited := annotation_objects(chunk, index):
                choice["message"]["annotations"] = cited
        if options.wants_audio:
            data = self._audio if audio is None else audio
            choices[0]["message"]["audio"] = {
                "id": audio_id(options),
                "data": base64.b64encode(data).decode(),
                "expires_at": options.created + AUDIO_EXPIRES_SEC,
                "transcript": self._choices[0].spoken,
            }
        extra = _extra(chunk, options, usage_object(chunk.usage), whole=True)
        completion = options.object("chat.completion", choices, **extra)
        if self._transcript and options.input_transcript:
            told = {} if self._language is None else {"language": self._language}
            pieces = (piece.strip() for piece in self._transcript)  # a piece may begin with a blank, or have no words
            completion["input_transcript"] = {"text": " ".join(filter(None, pieces)), **told}
        return completion

    @property
    def spoken(self) -> str:
        """The transcript of a spoken answer."""
        return self._choices[0].spoken

    @property
    def audio(self) -> bytes:
        """The accumulated audio."""
        return bytes(self._audio)

    def _choice(self, index: int, reason: str) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "index": index,
            "message": choice.message(wants_text=self._options.wants_text),
            "logprobs": choice.logprobs() if self._options.logprobs else None,
            "finish_reason": reason,
        }


class Base64Stream:
    """Encodes a byte stream as base64 in pieces that concatenate to the base64 of the whole.

    All pieces but the last encode a multiple of 3 bytes and have no padding.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> str:
        """Return the base64 of all complete groups of 3 bytes, and keep the rest."""
        data = self._rest + data
        whole = len(data) - len(data) % 3
        self._rest = data[whole:]
        return base64.b64encode(data[:whole]).decode()

    def finish(self) -> str:
        """Return the base64 of the rest, padded."""
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode()


def transcript_object(chunk: OutputChunk) -> dict[str, Any]:
    """Return the field ``input_transcript`` for a transcript of the input."""
    language = heard_language(chunk.hearing)
    told = {} if language is None else {"language": language}
    return {"text": chunk.text, "interim": chunk.interim, "start_ms": chunk.start_ms, **told}


def logprobs_object(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the field ``logprobs`` of a chat choice."""
    content = [{**_token(one), "top_logprobs": [_token(top) for top in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": finite_logprob(token.logprob), "bytes": list(token.data)}


def audio_id(options: ResponseOptions) -> str:
    """Return the id of an answer's audio."""
    return "audio_" + options.completion_id.removeprefix("chatcmpl-")


# ``/v1/completions``: ``text_completion`` objects, whole and in chunks.


class _Unsent:
    """The text of one choice that is still to be sent, with the ``logprobs`` of its tokens."""

    def __init__(self) -> None:
        #: The index in the text of the choice, in characters, at which the next token begins. A character may span
        #: tokens.
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin()

    def _begin(self) -> None:
        self.text = ""
        self._logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def append(self, chunk: OutputChunk) -> None:
        self.text += chunk.text
        logprobs = self._logprobs
        for token in chunk.logprobs:
            logprobs["tokens"].append(token.token)
            logprobs["token_logprobs"].append(finite_logprob(token.logprob))
            # OpenAI includes the sampled token even when it is not among the most probable ones.
            top = {one.token: finite_logprob(one.logprob) for one in (*token.top, token)}
            logprobs["top_logprobs"].append(None if token.logprob is None else top)
            logprobs["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(token.data))

    def take(self) -> tuple[str, dict[str, list[Any]]]:
        """Remove and return the text and its ``logprobs``."""
        text, logprobs = self.text, self._logprobs
        self._begin()
        return text, logprobs


class Completion:
    """Encodes a completion: a stream with ``output`` and ``final``, or a whole response with ``add`` and ``whole``.

    In a stream, the text of each output waits for the next output, so that the chunk with the last text of a choice can
    also have the finish reason, and no empty chunk is needed.
    """

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._unsent = [_Unsent() for _ in range(options.choices)]

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Keep the text of this output; yield a chunk with the text of the choice that was kept before, if any.

        Outputs other than text are ignored.
        """
        if chunk.modality is not OutputModality.TEXT:
            return
        if chunk.text and self._unsent[chunk.choice].text:
            yield self._object([self._choice(chunk.choice, None)])
        self._unsent[chunk.choice].append(chunk)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of each choice, and the usage if requested."""
        options = self._options
        usage = usage_object(chunk.usage)
        for index, reason in enumerate(finish_reasons(chunk, options.choices)):
            last = index == options.choices - 1
            extra = _extra(chunk, options, usage) if last else {}
            yield self._object([self._choice(index, reason)], **extra)
        if options.include_usage and not options.usage_on_final_chunk:
            yield self._object([], usage=usage)

    def add(self, chunk: OutputChunk) -> None:
        """Add an output; all but text is ignored."""
        if chunk.modality is OutputModality.TEXT:
            self._unsent[chunk.choice].append(chunk)

    def whole(self, chunk: FinalChunk) -> dict[str, Any]:
        """Return the response."""
        reasons = finish_reasons(chunk, self._options.choices)
        choices = [self._choice(index, reason) for index, reason in enumerate(reasons)]
        return self._object(choices, **_extra(chunk, self._options, usage_object(chunk.usage), whole=True))

    def _choice(self, index: int, finish_reason: str | None) -> dict[str, Any]:
        """Return the object of a choice with its text that is still to be sent."""
        text, logprobs = self._unsent[index].take()
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs if self._options.logprobs else None,
            "finish_reason": finish_reason,
        }

    def _object(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return self._options.object("text_completion", choices, **extra)


# ``/v1/audio/speech``: event streams, in two dialects.


class SpeechEvents:
    """Encodes speech as OpenAI's typed events (``stream_format: sse``); the stream ends without [DONE]."""

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the event for audio; nothing for other outputs."""
        if chunk.modality is OutputModality.AUDIO:
            yield {"type": "speech.audio.delta", "audio": base64.b64encode(chunk.payload).decode()}

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last event."""
        usage = chunk.usage
        yield {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.input_tokens,
                "output_tokens": usage.output_tokens,
                "total_tokens": usage.total_tokens,
            },
        }


class SpeechChunks:
    """Encodes speech as ``audio.speech.chunk`` objects (``stream: true``); the stream ends with [DONE].

    ``piece`` converts the audio of an output to the content of its event, for example to part of a file.
    """

    def __init__(
        self,
        speech_id: str,
        response_format: str,
        media_type: str,
        sample_rate: int,
        *,
        piece: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._piece = piece
        self._id = speech_id
        self._index = 0
        self._audio = {"format": response_format, "mime_type": media_type, "sample_rate": sample_rate}

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the object for audio; nothing for other outputs."""
        if chunk.modality is OutputModality.AUDIO:
            data = base64.b64encode(self._piece(chunk.payload)).decode()
            yield self._chunk(audio={"data": data, **self._audio}, finish_reason=None)

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last object."""
        yield self._chunk(audio=None, finish_reason=chunk.finish_reason.value, usage=usage_object(chunk.usage))

    def _chunk(self, **fields: Any) -> dict[str, Any]:
        index, self._index = self._index, self._index + 1
        return {"id": self._id, "object": "audio.speech.chunk", "index": index, **fields}


# ``/v1/audio/transcriptions``: text, JSON, subtitles, events.


class Transcription:
    """Accumulates a transcription. Its text is the engine's answer; its times are those of the transcript's words.

    ``language`` is the English name of a language: ``verbose_json`` reports it if the recogniser detects none. None if
    unknown. ``translates``: the text is an English translation, and reported as such.
    """

    def __init__(self, request: TranscriptionRequest, *, language: str | None, translates: bool) -> None:
        self._request = request
        self._language = language
        self._translates = translates
        self._text: list[str] = []
        self._words: list[Word] = []
        #: The settled transcripts, each with its start and end in the input, in milliseconds.
        self._cues: list[tuple[str, int, int]] = []
        self._found: str | None = None
        #: The segments; None once a segment with missing fields has occurred.
        self._heard: list[HeardSegment] | None = []

    def output(self, chunk: OutputChunk) -> None:
        """Add an output: text, or a settled transcript with the times of its words; others are ignored."""
        if chunk.modality is OutputModality.TEXT:
            self._text.append(chunk.text)
        elif chunk.modality is OutputModality.TRANSCRIPT and not chunk.interim and chunk.words:
            self._words += chunk.words
            self._cues.append((chunk.text.strip(), chunk.words[0].start_ms, chunk.words[-1].end_ms))
            hearing = chunk.hearing or Hearing()
            self._found = self._found or hearing.language
            self._heard = None if self._heard is None or not hearing.segments else [*self._heard, *hearing.segments]

    def text(self) -> str:
        """Return the text so far, stripped."""
        return "".join(self._text).strip()

    def json(self, final: FinalChunk) -> dict[str, Any]:
        """Return the response for ``json`` and ``verbose_json``."""
        if self._request.response_format == "json":
            return {"text": self.text(), "usage": duration_usage(final.usage)}
        response: dict[str, Any] = {"task": "translate" if self._translates else "transcribe"}
        language = "english" if self._translates else self._found or self._language
        if language is not None:
            response["language"] = language
        response |= {"duration": final.usage.input_audio_ms / 1000, "text": self.text()}
        if "segment" in self._request.granularities:
            response["segments"] = [_segment_object(index, one) for index, one in enumerate(self._heard or ())]
        if "word" in self._request.granularities:
            response["words"] = [
                {"word": word.text, "start": word.start_ms / 1000, "end": word.end_ms / 1000} for word in self._words
            ]
        return {**response, "usage": duration_usage(final.usage)}

    def subtitles(self) -> str:
        """Return the settled transcripts as SubRip or WebVTT, with one cue for each."""
        vtt = self._request.response_format == "vtt"
        lines = ["WEBVTT", ""] if vtt else []
        for number, (text, start_ms, end_ms) in enumerate(self._cues, 1):
            times = f"{_timestamp(start_ms, vtt)} --> {_timestamp(end_ms, vtt)}"
            lines += [times, text, ""] if vtt else [str(number), times, text, ""]
        return "".join(f"{line}\n" for line in lines)


def _segment_object(index: int, one: HeardSegment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": one.start_ms // 10,  # in frames of the spectrogram, as Whisper counts
        "start": one.start_ms / 1000,
        "end": one.end_ms / 1000,
        "text": one.text,
        "tokens": one.tokens,
        "temperature": one.temperature,
        "avg_logprob": one.avg_logprob,
        "compression_ratio": one.compression_ratio,
        "no_speech_prob": one.no_speech_prob,
    }


class TranscriptionEvents:
    """Encodes a transcription as OpenAI's typed events (``stream: true``); the stream ends without [DONE]."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the event for text; nothing for other outputs, and for blanks before the first word."""
        if chunk.modality is OutputModality.TEXT:
            # Leading white space is stripped from the whole text, thus from the first delta.
            text = chunk.text if self._text else chunk.text.lstrip()
            if text:
                self._text.append(text)
                yield {"type": "transcript.text.delta", "delta": text}

    def final(self, chunk: FinalChunk) -> Iterator[dict[str, Any]]:
        """Yield the last event, with the whole text."""
        yield {
            "type": "transcript.text.done",
            "text": "".join(self._text),
            "usage": duration_usage(chunk.usage),
        }


def duration_usage(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object with the duration of the input audio."""
    return {"type": "duration", "seconds": usage.input_audio_ms / 1000}


def _timestamp(milliseconds: int, vtt: bool) -> str:
    """Format a time for subtitles: ``hh:mm:ss,mmm``, or ``hh:mm:ss.mmm`` for WebVTT."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{'.' if vtt else ','}{rest:03}"


# Helpers that the routes share.

#: OpenAI's value for the log-probability of a token with negligible probability.
MIN_LOGPROB: Final = -9999.0


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return ``usage`` as OpenAI's object, with the audio durations in milliseconds as additional fields."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "input_audio_ms": usage.input_audio_ms,
        "output_audio_ms": usage.output_audio_ms,
        "input_after_start_bytes": usage.input_after_start_bytes,
    }
    if usage.cached_tokens is not None:
        fields["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return fields


def _extra(
    final: FinalChunk, options: ResponseOptions, usage: dict[str, Any], *, whole: bool = False
) -> dict[str, Any]:
    """Return the fields usage, warnings and times of the last final chunk, or of a ``whole`` response."""
    extra: dict[str, Any] = {"usage": usage} if whole or options.usage_on_final_chunk else {}
    if warnings := warning_objects(final):
        extra["warnings"] = warnings
    if options.include_times and final.times:
        extra["times"] = final.times
    return extra


def warning_objects(final: FinalChunk) -> list[dict[str, Any]]:
    """Return the warnings of an answer as JSON objects, without those about its finish reason: the response has it.

    If a part of the engine failed, ``param`` is its name.
    """
    return [
        {"code": one.code, "message": one.message, "param": one.param}
        for one in final.warnings
        if one.code != FINISH_REASON_WARNING  # the finish reason is in the response itself
    ]


def annotation_objects(final: FinalChunk, choice: int) -> list[dict[str, Any]]:
    """Return OpenAI's ``annotations`` of one choice: the web pages that are its sources."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "title": one.title,
                "url": one.url,
                "start_index": one.start,
                "end_index": one.end,
                **({"license": one.license} if one.license else {}),
            },
        }
        for one in final.citations
        if one.choice == choice
    ]


def finish_reasons(final: FinalChunk, choices: int) -> tuple[str, ...]:
    """Return the finish reason of each choice; after an early end, all choices have the reason of the request.

    A reason of another server that FinishReason lacks is returned as that server named it.
    """
    reasons = final.finish_reasons if len(final.finish_reasons) == choices else (final.finish_reason,) * choices
    foreign = final.foreign_reasons if len(final.foreign_reasons) == choices else (None,) * choices
    return tuple(name or reason.value for name, reason in zip(foreign, reasons, strict=True))


def finite_logprob(logprob: float | None) -> float | None:
    """Return ``logprob`` with a lower bound, since JSON cannot express minus infinity."""
    return logprob if logprob is None else max(logprob, MIN_LOGPROB)


def ended_normally(chunk: FinalChunk) -> bool:
    """Whether the answer ended normally, neither cancelled nor failed."""
    return chunk.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
