"""Responses of ``/v1/audio/transcriptions``: text, JSON, subtitles, events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omni_ws.core.chunks import FinalChunk, HeardSegment, Hearing, OutputChunk, OutputModality, Usage, Word
from omni_ws.wire.openai_transcription import TranscriptionRequest


@dataclass(frozen=True, slots=True)
class _Segment:
    """A settled transcript with its time in the input."""

    text: str
    start_ms: int
    end_ms: int


class Transcription:
    """Accumulates a transcription. Its text is the engine's answer; times are those of the transcript's words.

    ``language`` is the English name of the one that ``verbose_json`` reports where the recogniser has found none, or
    None when unknown.
    """

    def __init__(self, request: TranscriptionRequest, *, language: str | None, translates: bool = False) -> None:
        self._request = request
        self._language = language
        self._translates = translates
        self._text: list[str] = []
        self._words: list[Word] = []
        self._segments: list[_Segment] = []
        self._found: str | None = None
        #: None once a segment is incomplete.
        self._heard: list[HeardSegment] | None = []

    def output(self, chunk: OutputChunk) -> None:
        """Add an output."""
        if chunk.modality is OutputModality.TEXT:
            self._text.append(chunk.text)
        elif chunk.modality is OutputModality.TRANSCRIPT and not chunk.interim and chunk.words:
            self._words += chunk.words
            self._segments.append(_Segment(chunk.text.strip(), chunk.words[0].start_ms, chunk.words[-1].end_ms))
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
            response["segments"] = [_segment(index, one) for index, one in enumerate(self._heard or ())]
        if "word" in self._request.granularities:
            response["words"] = [
                {"word": word.text, "start": word.start_ms / 1000, "end": word.end_ms / 1000} for word in self._words
            ]
        return {**response, "usage": duration_usage(final.usage)}

    def subtitles(self) -> str:
        """Return the segments as SubRip or WebVTT, one cue for each."""
        vtt = self._request.response_format == "vtt"
        lines = ["WEBVTT", ""] if vtt else []
        for number, one in enumerate(self._segments, 1):
            times = f"{_timestamp(one.start_ms, vtt)} --> {_timestamp(one.end_ms, vtt)}"
            lines += [times, one.text, ""] if vtt else [str(number), times, one.text, ""]
        return "".join(f"{line}\n" for line in lines)


def _segment(index: int, one: HeardSegment) -> dict[str, Any]:
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
    """OpenAI's typed events (``stream: true``); the stream ends without [DONE]."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def output(self, chunk: OutputChunk) -> Iterator[dict[str, Any]]:
        """Yield the event for an output."""
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
    """Return OpenAI's usage object for the duration of the input audio."""
    return {"type": "duration", "seconds": usage.input_audio_ms / 1000}


def _timestamp(milliseconds: int, vtt: bool) -> str:
    """Format a time as subtitles do: ``hh:mm:ss,mmm``, in WebVTT with a full stop."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{'.' if vtt else ','}{rest:03}"
