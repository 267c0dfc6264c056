"""``/v1/audio/transcriptions``, ``/v1/audio/translations``: a file in a form, or audio that is still arriving."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from omni_ws.core.json_values import language_name
from omni_ws.engine.base import AnswerOptions
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.transport.http.application import Router
from omni_ws.transport.http.exchange import FormPart, HttpExchange, read_form
from omni_ws.transport.routes.generation import GenerationRoutes, InputSource
from omni_ws.transport.routes.mode_a import is_file, is_streaming_input
from omni_ws.transport.routes.response_stream import charging, collect_answer
from omni_ws.wire.openai_requests import (
    TIMED_FORMATS,
    TranscriptionRequest,
    audio_file,
    form_fields,
    read_transcription,
)
from omni_ws.wire.openai_responses import Transcription, TranscriptionEvents
from omni_ws.wire.streaming_body import FORM_TYPE

_SUBTITLE_TYPES: Final = {"srt": "application/x-subrip; charset=utf-8", "vtt": "text/vtt; charset=utf-8"}


class TranscriptionRoutes(GenerationRoutes):
    """The handlers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/audio/transcriptions", self.transcriptions)
        router.add("POST", "/v1/audio/translations", self.translations)

    async def transcriptions(self, exchange: HttpExchange) -> None:
        """Respond with a transcript, in the format that the request asks for, or with events as it is recognised."""
        await self._transcribe(exchange, AnswerOptions())

    async def translations(self, exchange: HttpExchange) -> None:
        """Respond with a transcript in English. Raises UnsupportedParameter."""
        if not self.sessions.engine.capabilities.translates:
            raise UnsupportedParameter("translation is not supported by this engine", param="model")
        await self._transcribe(exchange, AnswerOptions(translate=True))

    async def _transcribe(self, exchange: HttpExchange, options: AnswerOptions) -> None:
        async with self.admitted(exchange) as owner:
            request_type = exchange.request.content_type
            if is_streaming_input(exchange.request) or (request_type == FORM_TYPE and await is_file(exchange)):
                stream = self.streaming_body(exchange)
                request = read_transcription(await stream.parameters())
                await self._respond(exchange, request, stream.feed, options=options, owner=owner, streaming_input=True)
                return
            parts = await read_form(exchange, self.config.http.max_body_bytes)
            fields = form_fields(_texts(parts))
            streams = str(fields.get("stream")).lower() in ("true", "1")
            async with self.errors_as_events(exchange, wanted=streams):
                request = read_transcription(fields, input_field="file")
                file = _file(parts)
                chunk = audio_file(bytes(file.data), filename=file.filename or "", content_type=file.content_type)
                await self._respond(exchange, request, self.source_of([chunk]), options=options, owner=owner)

    async def _respond(
        self,
        exchange: HttpExchange,
        request: TranscriptionRequest,
        source: InputSource,
        *,
        options: AnswerOptions,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        language = self._language(request)
        session, _ = self.open_session(
            exchange, request.patch, owner=owner, samples=False, streaming_input=streaming_input
        )
        session.conversation.options = options
        streamed = streaming_input if request.stream is None else request.stream
        if streamed and request.response_format not in TIMED_FORMATS:
            async with session.running(partial(source, session)):
                await self.stream_events(
                    exchange, session, TranscriptionEvents(), head_at_start=streaming_input, done=False
                )
            return
        with charging(self.sessions.budget) as charge:
            async with session.running(partial(source, session)):
                outputs, final = await collect_answer(session, charge)
            transcription = Transcription(request, language=language, translates=options.translate)
            for output in outputs:
                transcription.output(output)
            match request.response_format:
                case "text":
                    kind, text = "text/plain; charset=utf-8", transcription.text() + "\n"
                case "srt" | "vtt" as subtitles:
                    kind, text = _SUBTITLE_TYPES[subtitles], transcription.subtitles()
                case _:
                    await exchange.respond_json(200, transcription.json(final))
                    return
            await exchange.respond(200, [("Content-Type", kind)], text.encode())

    def _language(self, request: TranscriptionRequest) -> str | None:
        """The name of the language that is recognised, None where nobody says.

        Raises UnsupportedParameter where words have no times.
        """
        capabilities = self.sessions.engine.capabilities
        if request.response_format in TIMED_FORMATS and not capabilities.word_times:
            raise UnsupportedParameter("timestamps are not supported by this engine", param="response_format")
        languages = capabilities.languages
        code = next(iter(languages)) if request.language is None and len(languages) == 1 else request.language
        return None if code is None else language_name(code)


def _texts(parts: list[FormPart]) -> Iterator[tuple[str, str]]:
    """Names and values of the parts that are no files. Raises InvalidValue for a value that is not UTF-8."""
    for part in parts:
        if part.filename is None:
            try:
                yield part.name, part.data.decode()
            except UnicodeDecodeError:
                raise InvalidValue(
                    "a form field must be valid UTF-8; a file must have a filename", param=part.name[:64]
                ) from None


def _file(parts: list[FormPart]) -> FormPart:
    """The part that is the recording. Raises InvalidValue unless it is the only file."""
    files = [part for part in parts if part.filename is not None]
    if len(files) != 1 or files[0].name != "file":
        raise InvalidValue("exactly one file is required, in the field file", param="file")
    return files[0]
