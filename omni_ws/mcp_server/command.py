"""The command ``omni-ws mcp``: its options, its transports, and ProgramVoice, which does the work of the tools."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_ws.cli import INTERRUPTED
from omni_ws.client import (
    Answer,
    AudioChunk,
    ClientSession,
    ConnectionFailed,
    ConnectionLost,
    ErrorEvent,
    ServerError,
    SpeechStarted,
    connect,
)
from omni_ws.client.audio import Pcm16, UnreadableAudio, read_wav
from omni_ws.client.events import AnswerCollector
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, InputChunk, Modality
from omni_ws.errors import InvalidValue, OmniError, PayloadTooLarge, UnsupportedModality, UnsupportedParameter
from omni_ws.installing import install_command
from omni_ws.scenarios.servers import run_interruptible
from omni_ws.talk.command import found_server
from omni_ws.talk.sound_devices import PIECE_MS, LoudspeakerDevice, MicrophoneDevice, NoSoundDevice, named_device
from omni_ws.transport.http.access import Authenticator

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server


FAILED, USAGE = 1, 2
_KEY_VARIABLE: Final = "OMNI_WS_MCP_KEY"
#: A shorter key can be guessed.
_LEAST_KEY: Final = 16
_LOOPBACK: Final = "127.0.0.1"
#: The largest request: a text of the longest, with each character as an escape.
_MAX_BODY: Final = 1 << 17


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the server until its client leaves or, over HTTP, until a signal; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if find_spec("mcp") is None:
        return _complain(f"this needs the extra mcp: {install_command('mcp')}", USAGE)
    if options.files is not None and not options.files.is_dir():
        parser.error(f"--files {options.files}: not a folder")
    if options.key_file is not None and options.port is None:
        parser.error("--key-file goes with --port")
    if options.port is not None and not 0 <= options.port < 1 << 16:
        parser.error(f"--port {options.port}: a port is a number up to 65535")
    key = None if options.port is None else _key(parser, options.key_file, environ)
    voice = VoiceOptions(
        environ=environ,
        microphone=options.mic,
        files=options.files,
        url=options.url,
        api_key=environ.get("OMNI_WS_API_KEY") or None,
        input_device=options.input_device,
        output_device=options.output_device,
    )
    try:
        return run_interruptible(_serve(voice, options.port, key))
    except (KeyboardInterrupt, BrokenPipeError):
        return INTERRUPTED
    except OSError as error:
        return _complain(error, FAILED)


def _complain(problem: object, status: int) -> int:
    print(f"omni-ws mcp: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws mcp",
        description="An MCP server with the tools speak, listen and converse (docs/talk.md). It speaks MCP on standard "
        "input and output, or with --port over HTTP.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mic", action="store_true", help="allow the tools to open the microphone; a line here tells each time")
    add("--files", type=Path, metavar="DIR", help="allow listen to read WAV files of this folder")
    add("--url", help="voice server [that on port 8080, or else one that starts now]; its key: OMNI_WS_API_KEY")
    add("--port", type=int, metavar="N", help=f"serve HTTP on {_LOOPBACK}, with the key in {_KEY_VARIABLE}")
    add("--key-file", type=Path, metavar="FILE", help="file with that key")
    add(
        "--input-device",
        type=named_device,
        metavar="D",
        help="number or part of the name (omni-ws talk --list-devices)",
    )
    add("--output-device", type=named_device, metavar="D", help="as in omni-ws talk")
    return parser


def _key(parser: argparse.ArgumentParser, file: Path | None, environ: Mapping[str, str]) -> str:
    """Return the key that clients over HTTP must present. Exits if none is configured, or it is too short."""
    try:
        key = environ.get(_KEY_VARIABLE, "") if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--key-file {file}: {error}")
    if len(key) < _LEAST_KEY:
        parser.error(f"--port needs a key of {_LEAST_KEY} characters or more, in {_KEY_VARIABLE} or --key-file")
    return key


async def _serve(options: VoiceOptions, port: int | None, key: str | None) -> int:
    from omni_ws.mcp_server.tools import mcp_server

    async with ProgramVoice(options) as voice:
        # Models load while the program starts; what keeps them from it, the first call tells.
        warming = asyncio.create_task(_warm(voice))
        try:
            server = mcp_server(voice)
            await (_over_pipes(server) if port is None or key is None else _over_http(server, port, key))
        finally:
            warming.cancel()
            await asyncio.wait([warming])
    return 0


async def _warm(voice: ProgramVoice) -> None:
    with suppress(Exception):
        await voice.ready()


async def _over_pipes(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    if sys.stdin.isatty():
        print("omni-ws mcp: a program is to start this and speak MCP with it (docs/talk.md)", file=sys.stderr)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def _over_http(server: Server[Any], port: int, key: str) -> None:
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    listening = socket.create_server((_LOOPBACK, port))
    port = listening.getsockname()[1]
    hosts = [f"{name}:{port}" for name in (_LOOPBACK, "localhost")]
    app = server.streamable_http_app(
        transport_security=TransportSecuritySettings(
            allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts]
        ),
        max_request_body_size=_MAX_BODY,
    )
    config = uvicorn.Config(KeyNeeded(app, key), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    print(f"omni-ws mcp: http://{_LOOPBACK}:{port}/mcp", file=sys.stderr, flush=True)
    await uvicorn.Server(config).serve([listening])


class KeyNeeded:
    """ASGI middleware that lets requests with the key through, and answers others with the status 401."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._authenticator = Authenticator([ApiKey(name="mcp", key_sha256=digest(key))])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            presented = dict(scope["headers"]).get(b"authorization")
            try:
                self._authenticator.authenticate_header(None if presented is None else presented.decode("latin-1"))
            except OmniError as error:
                from starlette.responses import JSONResponse

                body = {"error": {"code": error.code, "message": error.message}}
                refusal = JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


# What the tools do: they speak, listen and ask, each call in a session of its own with a voice server.


#: The longest time for which the microphone or a file is heard, in seconds.
MAX_LISTEN_SEC: Final = 60
#: The largest file: a minute of stereo at 192 kHz, in 32 bits, and its header.
_MAX_FILE_BYTES: Final = MAX_LISTEN_SEC * 192_000 * 8 + (1 << 20)
_RATE: Final = 24_000
_SPEECH: Final = {"task": "speech", "modalities": ["audio"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceOptions:
    """The permissions that the operator gives, and the voice server to use.

    ``microphone``: whether tools may open it; ``files``: the folder whose files they may read, None for no files. If
    ``url`` is None, a server is found or started.
    """

    environ: Mapping[str, str]
    microphone: bool = False
    files: Path | None = None
    url: str | None = None
    api_key: str | None = None
    input_device: str | int | None = None
    output_device: str | int | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A text that was spoken, or an answer. ``sound`` is its audio, None if the audio was played.

    ``why_unplayed`` is the reason why the audio was not played although this was wanted.
    """

    text: str
    seconds: float
    sound: Pcm16 | None
    why_unplayed: str | None = None


class ProgramVoice:
    """The voice behind the tools: speaks, listens, and asks questions, by a voice server.

    As an asynchronous context manager, it ends the server if it has started one. Its methods raise OmniError,
    ConnectionFailed, ConnectionLost, ConfigurationError, NoServer and NoSoundDevice.
    """

    def __init__(self, options: VoiceOptions) -> None:
        self._options = options
        self._server: AsyncExitStack = AsyncExitStack()
        self._url = options.url
        self._finding = asyncio.Lock()
        #: Held while devices are in use, so that calls do not speak simultaneously, or hear each other.
        self._devices = asyncio.Lock()

    async def __aenter__(self) -> ProgramVoice:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.aclose()

    async def ready(self) -> str:
        """Return the URL of the voice server. Finds or starts one if none is known, or the last one is gone."""
        async with self._finding:
            if self._url is None:
                options = self._options
                self._url = await self._server.enter_async_context(
                    found_server(api_key=options.api_key, environ=options.environ)
                )
            return self._url

    async def speak(self, text: str, *, play: bool, voice: str | None = None) -> Said:
        """Speak a text on the loudspeaker. Without a loudspeaker, or without ``play``, return the audio."""
        return await self._said(_SPEECH, text, play=play, voice=voice)

    async def ask(self, message: str, *, play: bool, voice: str | None = None) -> Said:
        """Return the server's answer to a message, spoken as by ``speak``."""
        return await self._said({"modalities": ["text", "audio"]}, message, play=play, voice=voice)

    async def listen(self, seconds: float) -> str:
        """Open the microphone, and return the words that a person speaks in one turn; "" if none within ``seconds``."""
        self._check_microphone()
        async with self._devices:
            return await self._listen(seconds)

    async def ask_person(self, question: str, seconds: float, *, voice: str | None) -> str:
        """Speak a question on the loudspeaker, and return the words of the spoken answer; "" if there is none."""
        self._check_microphone()
        async with self._devices:
            with closing(LoudspeakerDevice(self._options.output_device)) as speaker:
                await self._answered({**_SPEECH, "voice": voice}, question, speaker)
            return await self._listen(seconds)

    async def hear_file(self, name: str) -> str:
        """Return the words in a WAV file, which must be in the folder that the operator allows."""
        audio = await asyncio.to_thread(self._read, name)
        sound = {"format": "pcm16", "sample_rate": audio.sample_rate, "channels": audio.channels}
        async with self._session({"task": "transcribe", "input_audio": sound}) as session:
            await session.send_audio(audio.samples, end=True)
            return (await session.answer()).transcript.strip()

    def _check_microphone(self) -> None:
        """Raise UnsupportedParameter if the operator does not allow the microphone."""
        if not self._options.microphone:
            raise UnsupportedParameter(
                "the microphone is off: only who starts `omni-ws mcp` can allow it, with --mic", param="--mic"
            )

    def _read(self, name: str) -> Pcm16:
        folder = self._options.files
        if folder is None:
            raise UnsupportedParameter(
                "files are not read: only who starts `omni-ws mcp` can allow it, with --files DIR", param="--files"
            )
        try:
            path = (folder / name).resolve(strict=True)
            inside = path.is_relative_to(folder.resolve(strict=True)) and path.is_file()
        except (OSError, ValueError):
            inside = False
        # What is elsewhere, and what is not there, are the same to who asks.
        if not inside:
            raise InvalidValue(f"there is no file {name} in the folder of --files", param="file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PayloadTooLarge(f"a file may hold {MAX_LISTEN_SEC} s of sound", param="file")
        try:
            audio = read_wav(path)
        except (OSError, UnreadableAudio) as error:
            raise InvalidValue(f"{name}: {error}", param="file") from None
        if audio.duration_ms > MAX_LISTEN_SEC * 1000:
            raise PayloadTooLarge(
                f"a file may hold {MAX_LISTEN_SEC} s of sound, {name} has {audio.duration_ms / 1000:.1f}", param="file"
            )
        return audio

    @asynccontextmanager
    async def _session(self, config: Mapping[str, Any]) -> AsyncIterator[ClientSession]:
        url = await self.ready()
        wanted = {name: value for name, value in config.items() if value is not None}
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(connect(url, api_key=self._options.api_key, config=wanted))
            except ConnectionFailed:
                await self._forget(url)
                raise
            yield session

    async def _forget(self, url: str) -> None:
        """Let the next call look for a server again, since the server at ``url`` is gone."""
        async with self._finding:
            if self._url == url and self._options.url is None:
                self._url = None
                await self._server.aclose()

    async def _said(self, config: Mapping[str, Any], text: str, *, play: bool, voice: str | None) -> Said:
        config = {**config, "voice": voice}
        if not play:
            return await self._answered(config, text, None)
        async with self._devices:
            try:
                speaker = LoudspeakerDevice(self._options.output_device)
            except NoSoundDevice as error:
                return replace(await self._answered(config, text, None), why_unplayed=str(error))
            with closing(speaker):
                return await self._answered(config, text, speaker)

    async def _answered(self, config: Mapping[str, Any], text: str, speaker: LoudspeakerDevice | None) -> Said:
        """Send a text, and return the answer to it. The answer is played by ``speaker``, or returned as audio."""
        output = {"format": "pcm16", "sample_rate": _RATE if speaker is None else speaker.sample_rate}
        async with self._session({**config, "output_audio": output}) as session:
            await session.send_text(text, end=True)
            collector = AnswerCollector()
            async for event in session.response():
                collector.add(event)
                if speaker is not None and isinstance(event, AudioChunk):
                    speaker.buffer.write(event.audio)
        answer = _succeeded(collector.take(None))
        sound = Pcm16(answer.audio, answer.sample_rate or _RATE)
        if config.get("task") == "speech" and not answer.audio:
            raise UnsupportedModality("the voice server made no sound of the text", param="text")
        if speaker is not None:
            speaker.buffer.end()
            await speaker.played()
        return Said(answer.text, sound.duration_ms / 1000, sound if speaker is None else None)

    async def _listen(self, seconds: float) -> str:
        microphone = MicrophoneDevice(self._options.input_device)
        try:
            sound = {"format": "pcm16", "sample_rate": microphone.sample_rate, "channels": 1}
            config = {"task": "transcribe", "input_audio": sound, "turn_detection": {"type": "server_vad"}}
            async with self._session(config) as session:
                if "semantic_vad" in session.created.capabilities.turn_detection_types:
                    await session.configure(turn_detection={"type": "semantic_vad"})
                return await _one_turn(session, microphone, seconds)
        finally:
            microphone.close()


async def _one_turn(session: ClientSession, microphone: MicrophoneDevice, seconds: float) -> str:
    """Return the words of the first turn that has any; "" if there is none within ``seconds`` of audio."""
    is_speaking = False
    close = _opened(microphone)

    async def send() -> None:
        """Send the microphone's audio for ``seconds``. A turn that goes on longer is cut off there."""
        try:
            async with aclosing(_recorded(microphone, seconds)) as stream:
                async for piece in stream:
                    await session.send_audio(piece)
        except NoSoundDevice:
            await session.close()  # no events are to be waited for
            raise
        close()
        await session.ping()
        if is_speaking:
            await session.send_chunk(InputChunk(Modality.AUDIO, b"", end_of_input=True))
        else:
            await session.close()

    sending = asyncio.create_task(send())
    collector = AnswerCollector()
    try:
        async for event in session.events():
            collector.add(event)
            if isinstance(event, SpeechStarted):
                is_speaking = True
            elif isinstance(event, ErrorEvent) and event.request_id is None:
                raise event.error
            if (answer := collector.take(None)) is not None:
                is_speaking = False
                if words := _succeeded(answer).transcript.strip():
                    return words
                if sending.done():
                    return ""
        await sending
        return ""
    finally:
        close()  # first: a call that its client cancels is cancelled again at every await
        sending.cancel()
        await asyncio.wait([sending])


def _opened(microphone: MicrophoneDevice) -> Callable[[], None]:
    """Start a microphone, and return the function that stops it. Start and stop are reported on the terminal."""
    is_open = True

    def close() -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            microphone.stop()
            _tell("the microphone is closed")

    microphone.start()
    _tell("the microphone is open")
    return close


async def _recorded(microphone: MicrophoneDevice, seconds: float) -> AsyncGenerator[bytes, None]:
    left = round(seconds * 1000 / PIECE_MS)
    async for piece in microphone.pieces():
        yield piece
        left -= 1
        if left <= 0:
            return


def _succeeded(answer: Answer | None) -> Answer:
    if answer is None:
        raise ConnectionLost("the session has ended")
    if answer.finish_reason in (FinishReason.ERROR, None):
        raise answer.errors[-1] if answer.errors else ServerError("the request failed", code="engine_failed")
    return answer


def _tell(line: str) -> None:
    print(f"omni-ws mcp: {line}", file=sys.stderr, flush=True)
