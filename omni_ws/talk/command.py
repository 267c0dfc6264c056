"""The command ``omni-ws talk``, and the choice of the server that it talks to.

The server is the one whose URL is given (native protocol or Realtime API), the one on the default port, or one that the
command starts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import orjson
from msgspec import to_builtins

from omni_ws.caller.script import Target, certificates, count
from omni_ws.cli import INTERRUPTED
from omni_ws.client import (
    DEFAULT_URL,
    ClientSession,
    ConnectionFailed,
    ConnectionLost,
    connect,
)
from omni_ws.client.audio import Pcm16, UnreadableAudio, read_wav, write_wav
from omni_ws.config import ServerConfig, load
from omni_ws.config.values import ConfigurationError
from omni_ws.errors import OmniError, Unauthenticated
from omni_ws.scenarios.servers import (
    REALTIME_RATE,
    NoServer,
    NotHere,
    own_server,
    run_interruptible,
    until_started,
)
from omni_ws.talk.conversation import (
    AnswerListener,
    DeviceRates,
    RealtimeSession,
    TalkSession,
    ask,
    connect_realtime,
    samples,
    talk_freely,
    talk_held,
    type_turns,
)
from omni_ws.talk.display import JsonDisplay, PlainDisplay, make_display, printable, sentence
from omni_ws.talk.sound_devices import (
    EchoBetween,
    LoudspeakerDevice,
    MicrophoneDevice,
    NoEchoCanceller,
    NoSoundDevice,
    list_devices,
    named_device,
)
from omni_ws.tools.weights import fetch_for_start
from omni_ws.wire.session_config import has_field

#: How long the default port may take to answer: it is on this machine.
_LOOK_SEC: Final = 5.0


@asynccontextmanager
async def found_server(*, api_key: str | None, environ: Mapping[str, str]) -> AsyncIterator[str]:
    """Yield the URL of the server on the default port; if there is none, run a server during the block.

    Before that, the weights that this server needs are fetched. Raises NoServer if it does not start,
    ConfigurationError if it is misconfigured, and the error of a server on the default port that refuses the session.
    """
    if await _answers(api_key):
        yield DEFAULT_URL
        return
    print("no server on the default port: one starts, and ends with this command", file=sys.stderr, flush=True)
    await _fetch(load((), environ).config)
    async with own_server({}) as authority:
        yield f"ws://{authority}/v1/streaming_input"


async def _fetch(config: ServerConfig) -> None:
    """Fetch the weights that the server needs, in a daemon thread, so that an interrupted command can end."""
    loop, fetched = asyncio.get_running_loop(), asyncio.Event()

    def fetch() -> None:
        try:
            fetch_for_start(config)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fetched.set)

    threading.Thread(target=fetch, name="weights", daemon=True).start()
    await fetched.wait()


async def _answers(api_key: str | None) -> bool:
    """Return whether an omni_ws server is on the default port; wait for one that starts. Raises as ``found_server``."""
    await until_started(Target.parse(DEFAULT_URL))
    try:
        async with connect(DEFAULT_URL, api_key=api_key, open_timeout=_LOOK_SEC):
            return True
    except ConnectionFailed:
        return False


# The command ``omni-ws talk``.


FAILED, USAGE, NO_SOUND, NO_SERVER, NO_KEY = 1, 2, 3, 4, 5
_EXIT_STATUSES: Final = "exits with: 0 answered, 1 failed, 2 usage, 3 sound, 4 server, 5 key, 130 ^C"
#: The value of --text without a text: lines are typed.
_TYPED: Final = ""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command, and return its exit status: see ``_EXIT_STATUSES``."""
    options = _parsed(arguments)
    try:
        if options.list_devices:
            print(list_devices())
            return 0
        return run_interruptible(_talk(options, environ))
    except (KeyboardInterrupt, BrokenPipeError):
        return INTERRUPTED
    except (NoSoundDevice, NoEchoCanceller) as error:
        return _complain(f"{error} (--text and --file do without)", NO_SOUND)
    except Unauthenticated as error:
        return _complain(f"{error}; set the environment variable {_key_variable(options)}", NO_KEY)
    except OmniError as error:
        return _complain(f"{error.code}: {error}", FAILED)
    except (ConnectionFailed, ConnectionLost, NoServer) as error:
        return _complain(error, NO_SERVER)
    except UnreadableAudio as error:
        return _complain(f"cannot read {options.file}: {error}", USAGE)
    except NotHere as error:
        return _complain(f"not with --realtime: {error}", USAGE)
    except ConfigurationError as error:
        return _complain("; ".join(error.problems), USAGE)
    except OSError as error:
        return _complain(error, USAGE)


def _complain(problem: object, status: int) -> int:
    print(printable(f"omni-ws talk: {problem}"), file=sys.stderr)
    return status


def _key_variable(options: argparse.Namespace) -> str:
    return options.key_env or ("OMNI_WS_API_KEY" if options.realtime is None else "OPENAI_API_KEY")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, with ``live`` (the microphone is the source) and ``settings`` (of the session) added."""
    parser = argparse.ArgumentParser(
        prog="omni-ws talk",
        usage="omni-ws talk [options]   speak, and hear the answer; q and Enter leave",
        epilog=_EXIT_STATUSES,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=80),
    )
    group = parser.add_argument_group()
    add, source = group.add_argument, group.add_mutually_exclusive_group().add_argument
    server = group.add_mutually_exclusive_group().add_argument

    def add_switch(name: str, words: str) -> None:
        add(f"--{name}", action="store_true", default=None, help=words)
        add(f"--no-{name}", dest=name.replace("-", "_"), action="store_false", help=argparse.SUPPRESS)

    add("--hold", action="store_true", help="Enter begins a turn, and Enter ends it")
    source("--text", nargs="?", const=_TYPED, metavar="TEXT", help="type instead, or send this text; no microphone")
    source("--file", metavar="X.wav", help="send a WAV file in real time; --fast: at full speed")
    add("--fast", action="store_true", help=argparse.SUPPRESS)
    source("--raw", action="store_true", help="send 16-bit mono samples from standard input")
    add("--rate", type=count, default=16_000, metavar="HZ", help="sample rate of --raw [16000]")
    add("--save", metavar="ANSWER.wav", help="write the spoken answer (--file, --text TEXT, --raw)")
    add_switch("play", "(--no-play) the answer [if no --json, no --save, no pipe]")
    add_switch("cancel-echo", "(--no-cancel-echo) of the loudspeaker [if it can]")
    add("--json", action="store_true", help="print one JSON object a line")
    add("--voice", help="name of a voice of the server")
    add("--task", metavar="T", choices=["chat", "speech", "transcribe"], help="chat, speech or transcribe [chat]")
    add("--config", action="append", default=[], metavar="KEY=VALUE", help="field of session_config, as JSON or text")
    server("--url", help="server [that on port 8080, or else one that starts now]")
    server("--realtime", metavar="URL", help="any server of OpenAI's Realtime API instead")
    add("--key-env", metavar="NAME", help="variable with the key [OMNI_WS_API_KEY, OPENAI_API_KEY]")
    add("--ca-file", type=certificates, metavar="X.pem", help="certificates to trust for wss:// [the system's]")
    source("--list-devices", action="store_true", help="print the sound devices")
    add("--input-device", type=named_device, metavar="D", help="number or part of the name")
    add("--output-device", type=named_device, metavar="D", help="number or part of the name")
    add("-h", "--help", action="help", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.text is not None:  # an argument that is not UTF-8 has surrogates
        options.text = os.fsencode(options.text).decode(errors="replace")
    live = options.text is None and not (options.file or options.raw or options.list_devices)
    _check_usage(parser, options, live=live)
    try:
        settings = _settings(options, is_open=live and not options.hold)
    except ValueError as error:
        parser.error(str(error))
    return argparse.Namespace(**vars(options), live=live, settings=settings)


def _check_usage(parser: argparse.ArgumentParser, options: argparse.Namespace, *, live: bool) -> None:
    """Exit if options contradict each other."""
    if options.save and (live or options.text == _TYPED):
        parser.error("--save goes with --file, --text TEXT or --raw")
    if not live and (options.hold or options.cancel_echo):
        parser.error(f"--{'hold' if options.hold else 'cancel-echo'} goes with the microphone")
    if options.hold and options.cancel_echo:
        parser.error("--cancel-echo goes without --hold, which closes the microphone before the answer")


def _settings(options: argparse.Namespace, *, is_open: bool) -> dict[str, Any]:
    """Build the session's settings from the command line. Raises ValueError."""
    fields: dict[str, Any] = {}
    for setting in options.config:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--config {setting}: must be KEY=VALUE")
        if not has_field(key):
            raise ValueError(f"--config {setting}: session_config has no field {key}")
        *path, name = key.split(".")
        place = fields
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"--config {setting}: {part} has a value already")
        try:
            place[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            place[name] = value
    fields |= {name: value for name in ("voice", "task") if (value := getattr(options, name)) is not None}
    if is_open and not isinstance(fields.setdefault("turn_detection", {}), dict):
        raise ValueError("an open microphone needs turn detection; --hold does without")
    if options.realtime is not None:
        fields.setdefault("turn_detection", None)
        return fields
    if is_open:
        fields["turn_detection"] = {"interrupt_resume": True, "duck": True, **fields["turn_detection"]}
    for name in ("input_audio", "output_audio"):
        if not isinstance(fields.get(name, {}), dict):
            raise ValueError(f"--config {name}: must be an object; the formats are those of the devices")
    # Playback and --save need this format.
    fields["output_audio"] = {**fields.get("output_audio", {}), "format": "pcm16"}
    return fields


async def _talk(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    audio = read_wav(options.file) if options.file else None
    rate = 16_000 if options.realtime is None else REALTIME_RATE
    microphone = MicrophoneDevice(options.input_device, sample_rate=rate) if options.live else None
    loudspeaker = _open_loudspeaker(options)
    if microphone and loudspeaker and not options.hold:
        _cancel_echo(microphone, loudspeaker, wanted=options.cancel_echo)
    rates = DeviceRates(
        heard=microphone.sample_rate if microphone else audio.sample_rate if audio else options.rate,
        heard_channels=audio.channels if audio else 1,
        played=loudspeaker.sample_rate if loudspeaker else REALTIME_RATE,
    )
    key = environ.get(_key_variable(options)) or None
    try:
        if options.realtime is not None:
            async with connect_realtime(
                options.realtime, api_key=key, config=options.settings, tls=options.ca_file, rates=rates
            ) as session:
                return await _converse(session, options, audio, microphone, loudspeaker)
        async with _native(options, environ, key, rates) as native:
            return await _converse(native, options, audio, microphone, loudspeaker)
    finally:
        for sound in (microphone, loudspeaker):
            if sound:
                sound.close()


@asynccontextmanager
async def _native(
    options: argparse.Namespace, environ: Mapping[str, str], key: str | None, rates: DeviceRates
) -> AsyncIterator[ClientSession]:
    """Open a session of the native protocol, with semantic_vad if the server has it and no type of VAD was chosen."""
    config = options.settings
    is_open = options.live and not options.hold
    # What the server has is known once it has answered.
    may_choose = is_open and "type" not in config["turn_detection"]
    if may_choose:
        config["turn_detection"]["type"] = "server_vad"
    if options.text is None:
        sound = {"format": "pcm16", "sample_rate": rates.heard, "channels": rates.heard_channels}
        config["input_audio"] = {**config.get("input_audio", {}), **sound}
    config["output_audio"]["sample_rate"] = rates.played
    async with AsyncExitStack() as stack:
        url = options.url
        if url is None:
            url = await stack.enter_async_context(found_server(api_key=key, environ=environ))
        session = await stack.enter_async_context(
            connect(url, api_key=key, config=config, ssl=options.ca_file, reconnect=True)
        )
        if may_choose and "semantic_vad" in session.created.capabilities.turn_detection_types:
            await session.configure(turn_detection={"type": "semantic_vad"})
        yield session


async def _converse(
    session: ClientSession | RealtimeSession,
    options: argparse.Namespace,
    audio: Pcm16 | None,
    microphone: MicrophoneDevice | None,
    loudspeaker: LoudspeakerDevice | None,
) -> int:
    """Talk in the way that the options choose, and return the exit status."""
    typed = options.text is not None and not options.json
    display = PlainDisplay(times=options.text != _TYPED) if typed else make_display(as_json=options.json)
    listener = AnswerListener(display, loudspeaker, interruptible=_is_interruptible(session))
    try:
        _introduce(session, display, live=options.live or options.text == _TYPED)
        if microphone:
            await (talk_held if options.hold else talk_freely)(session, microphone, listener)
            return 0
        if options.text == _TYPED:
            await type_turns(session, listener)
            return 0
        return await _ask(session, options, audio, listener)
    finally:
        display.close()


def _is_interruptible(session: ClientSession | RealtimeSession) -> bool:
    if isinstance(session, RealtimeSession):
        return session.is_interruptible
    config = session.config
    turns = config.turn_detection if config else None
    return bool(config and turns and turns.interrupt_response and config.overlap == "interrupt")


def _introduce(session: ClientSession | RealtimeSession, display: JsonDisplay, *, live: bool) -> None:
    """Show the session; in a conversation (``live``) also which parts serve it, and what the server advises."""
    if isinstance(session, RealtimeSession):
        model = session.created.get("model")
        display.show("session", session_id=session.created.get("id"), model=model)
        lines = [("parts", f"{model}, by the Realtime API")]
    else:
        created = session.created
        display.show("session", session_id=session.session_id, model=created.model, parts=to_builtins(created.parts))
        lines = [("parts", sentence(created)), ("note", created.advice or "")]
    for kind, line in lines:
        if live and line:
            display.show(kind, message=line)


async def _ask(session: TalkSession, options: argparse.Namespace, audio: Pcm16 | None, listener: AnswerListener) -> int:
    try:
        await ask(session, listener, text=options.text, audio=samples(audio, fast=options.fast))
    except OmniError as error:
        if error is listener.error:  # which is shown
            return FAILED
        raise
    if options.save and listener.reply:
        reply = Pcm16(bytes(listener.reply), listener.reply_rate)
        write_wav(options.save, reply)
        listener.display.show("saved", message=f"{reply.duration_ms:.0f} ms in {options.save}")
    if listener.error:
        return FAILED
    return _complain("the answer has no sound; nothing was saved", FAILED) if options.save and not listener.reply else 0


def _open_loudspeaker(options: argparse.Namespace) -> LoudspeakerDevice | None:
    """Open the output device; None if the answer is not to be played.

    A missing device is an error in a conversation by voice and with ``--play``; otherwise the answer is not played.
    """
    by_default = options.live or (sys.stdout.isatty() and not options.json and not options.save)
    if not (by_default if options.play is None else options.play):
        return None
    try:
        return LoudspeakerDevice(options.output_device)
    except NoSoundDevice as error:
        if options.play or options.live:
            raise
        if options.text is None:
            print(f"omni-ws talk: the answer is not played: {error}", file=sys.stderr)
        return None


def _cancel_echo(microphone: MicrophoneDevice, loudspeaker: LoudspeakerDevice, *, wanted: bool | None) -> None:
    """Put an echo canceller between the devices, unless ``wanted`` is False.

    If there is none, raises NoEchoCanceller if ``wanted`` is True, and prints a note if it is None.
    """
    if wanted is False:
        return
    try:
        canceller = EchoBetween(
            microphone_rate=microphone.sample_rate,
            loudspeaker_rate=loudspeaker.sample_rate,
            latency_ms=microphone.latency_ms + loudspeaker.latency_ms,
        )
    except NoEchoCanceller as error:
        if wanted:
            raise
        print(f"omni-ws talk: no echo canceller, so use a headset: {error}", file=sys.stderr)
    else:
        microphone.cancel_echo(canceller)
        loudspeaker.cancel_echo(canceller)
