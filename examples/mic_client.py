"""Talks to an omni_ws server: microphone, file, text or raw samples in; transcript, reply and sound out.

.venv/bin/python examples/mic_client.py                       push-to-talk with Enter
.venv/bin/python examples/mic_client.py --open-mic            hands-free; speak to interrupt
.venv/bin/python examples/mic_client.py --file question.wav   in real time; --fast: at full speed
.venv/bin/python examples/mic_client.py --text "Hello!" --save reply.wav
arecord -f S16_LE -r 16000 -t raw | .venv/bin/python examples/mic_client.py --raw
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import count
from typing import Any

from mic_display import JsonDisplay, make_display
from mic_echo import EchoCanceller, NoEchoCanceller
from mic_listener import Listener
from mic_parts import sentence
from mic_sound import PIECE_MS, Loudspeaker, Microphone, NoSoundDevice, choose_device, list_devices
from mic_tools import ToolRunner
from msgspec import to_builtins
from tool_client import QUESTION, RESULTS

from omni_ws.client import (
    DEFAULT_URL,
    ClientSession,
    ConnectionFailed,
    ConnectionLost,
    connect,
)
from omni_ws.client.audio import Pcm16, UnreadableAudio, paced, pieces, read_ahead, read_wav, write_wav
from omni_ws.errors import OmniError, Unauthenticated
from omni_ws.wire.session_config import has_field

FAILED, USAGE, NO_SOUND, NO_SERVER, NO_KEY, INTERRUPTED = 1, 2, 3, 4, 5, 130
#: Interval of playback reports.
REPORT_SEC = 0.2
EXIT_STATUSES = "exits with: 0 answered, 1 failed, 2 usage, 3 sound, 4 server, 5 key, 130 ^C"
#: So many pieces without a level, and the microphone is probably switched off.
SILENT_PIECES = 3000 // PIECE_MS
#: Interval of levels on a terminal.
LEVELS_SEC = 1 / 15


def main() -> int:
    options = parse_arguments()
    try:
        if options.list_devices:
            print(list_devices())
            return 0
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (NoSoundDevice, NoEchoCanceller) as error:
        return complain(error, NO_SOUND)
    except Unauthenticated as error:
        return complain(f"{error}; give one with --api-key or OMNI_WS_API_KEY", NO_KEY)
    except OmniError as error:
        return complain(f"{error.code}: {error}", FAILED)
    except (ConnectionFailed, ConnectionLost) as error:
        return complain(error, NO_SERVER)
    except UnreadableAudio as error:
        return complain(f"cannot read {options.file}: {error}", USAGE)
    except OSError as error:
        return complain(error, USAGE)


def complain(problem: object, status: int) -> int:
    print(f"mic_client: {problem}", file=sys.stderr)
    return status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="mic_client.py [options]  push-to-talk: Enter begins and ends; q leaves",
        epilog=EXIT_STATUSES,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=80),
    )
    add = parser.add_argument_group().add_argument

    def add_switch(name: str, *, default: bool | None, words: str) -> None:
        add(f"--{name}", action="store_true", default=default, help=words)
        add(f"--no-{name}", dest=name.replace("-", "_"), action="store_false", help=argparse.SUPPRESS)

    add("--open-mic", action="store_true", help="hands-free; speak to interrupt")
    add_switch("cancel-echo", default=None, words="(--no-cancel-echo) of the speaker, with --open-mic [auto]")
    add("--file", metavar="X.wav", help="send a WAV file in real time; --fast: at full speed")
    add("--fast", action="store_true", help=argparse.SUPPRESS)
    add("--text", help="send a text")
    add("--raw", action="store_true", help="send 16-bit mono samples from standard input")
    add("--rate", type=int, default=16_000, metavar="HZ", help="sample rate of --raw [16000]")
    add("--save", metavar="REPLY.wav", help="write the spoken reply (not with the microphone)")
    add_switch("play", default=None, words="(--no-play) the reply [if no --json, no --save, no pipe]")
    add("--json", action="store_true", help="print one JSON object a line")
    add("--voice", help="name of a voice of the server")
    add("--task", metavar="T", choices=["chat", "speech", "transcribe"], help="chat, speech or transcribe [chat]")
    add("--config", action="append", default=[], metavar="KEY=VALUE", help="field of session_config, as JSON or text")
    add_switch("tools", default=True, words="(--no-tools) let the model ask for the time in a city [on]")
    add("--url", default=DEFAULT_URL, help=f"[{DEFAULT_URL}]")
    add("--api-key", metavar="KEY", default=os.environ.get("OMNI_WS_API_KEY"), help="[$OMNI_WS_API_KEY]")
    add("--ca-file", metavar="X.pem", help="certificates to trust for wss:// [the system's]")
    add("--choose-devices", action="store_true", help="ask which to use; --list-devices: list them")
    add("--list-devices", action="store_true", help=argparse.SUPPRESS)
    add("--input-device", type=device, metavar="D", help="number or part of the name")
    add("--output-device", type=device, metavar="D", help="number or part of the name")
    add("-h", "--help", action="help", help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_usage(parser, options)
    try:
        options.settings = settings(options)
        options.tls = ssl.create_default_context(cafile=options.ca_file) if options.ca_file else None
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:  # includes SSLError, for a file without certificates
        parser.error(f"--ca-file {options.ca_file}: {error.strerror or error}")
    return options


def check_usage(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits if options contradict each other. Sets ``live``: whether the microphone is the source."""
    sources = [name for name in ("file", "text", "raw", "list_devices") if getattr(options, name) not in (None, False)]
    if len(sources) > 1:
        parser.error(f"--{sources[1].replace('_', '-')} is not allowed with --{sources[0]}")
    options.live = options.file is None and options.text is None and not options.raw
    if options.live and options.save:
        parser.error("--save goes with --file, --text or --raw")
    if options.open_mic and not options.live:
        parser.error("--open-mic goes with the microphone")
    if options.cancel_echo and not options.open_mic:
        parser.error("--cancel-echo goes with --open-mic")
    if options.choose_devices and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("--choose-devices needs a terminal; --list-devices and --input-device do without")


def device(value: str) -> str | int:
    return int(value) if value.isdecimal() else value


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Builds the session configuration from the command line. Raises ValueError."""
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
            place[name] = json.loads(value)
        except json.JSONDecodeError:
            place[name] = value
    fields |= {name: value for name in ("voice", "task") if (value := getattr(options, name)) is not None}
    if options.open_mic:
        turns = fields.setdefault("turn_detection", {})
        if not isinstance(turns, dict):
            raise ValueError("--open-mic goes with turn detection")
        turns.setdefault("interrupt_resume", True)
        turns.setdefault("duck", True)
    # Playback and --save need this format.
    fields["output_audio"] = {**fields.get("output_audio", {}), "format": "pcm16"}
    return fields


async def run(options: argparse.Namespace) -> int:
    audio = read_wav(options.file) if options.file else None
    if options.choose_devices:
        options.input_device, options.output_device = choose_device("input"), choose_device("output")
    microphone = Microphone(options.input_device) if options.live else None
    loudspeaker = open_loudspeaker(options)
    if options.open_mic and microphone and loudspeaker:
        cancel_echo(microphone, loudspeaker, wanted=options.cancel_echo)
    config = options.settings
    # What the server has is known once it has answered.
    may_choose = options.open_mic and "type" not in config["turn_detection"]
    if may_choose:
        config["turn_detection"]["type"] = "server_vad"
    if microphone or audio or options.raw:
        rate = microphone.sample_rate if microphone else audio.sample_rate if audio else options.rate
        config["input_audio"] = {"format": "pcm16", "sample_rate": rate, "channels": audio.channels if audio else 1}
    if loudspeaker:
        config["output_audio"]["sample_rate"] = loudspeaker.sample_rate
    async with connect(options.url, api_key=options.api_key, config=config, ssl=options.tls, reconnect=True) as session:
        display = make_display(as_json=options.json)
        listener = Listener(display, loudspeaker)
        tools = ToolRunner(session, display)
        introduce(session, display, live=options.live)
        try:
            if options.tools and options.task in (None, "chat"):
                await tools.offer()
            if microphone and options.open_mic:
                if may_choose and "semantic_vad" in session.created.capabilities.turn_detection_types:
                    await session.configure(turn_detection={"type": "semantic_vad"})
                await talk_freely(session, microphone, listener, tools)
                return 0
            if microphone:
                await talk(session, microphone, listener, tools)
                return 0
            return await ask(session, options, audio, listener, tools)
        finally:
            display.close()
            for sound in (microphone, loudspeaker):
                if sound:
                    sound.close()


def introduce(session: ClientSession, display: JsonDisplay, *, live: bool) -> None:
    """Tells which session this is; in a conversation also who works on the server, and what would be better."""
    created = session.created
    display.show("session", session_id=session.session_id, model=created.model, parts=to_builtins(created.parts))
    for kind, line in (("parts", sentence(created)), ("note", created.advice)):
        if live and line:
            display.show(kind, message=line)


def open_loudspeaker(options: argparse.Namespace) -> Loudspeaker | None:
    """Opens the output device, or returns None if no sound is wanted.

    A missing device is an error in a conversation and with ``--play``; otherwise the reply is merely not played.
    """
    by_default = options.live or (sys.stdout.isatty() and not options.json and not options.save)
    if not (by_default if options.play is None else options.play):
        return None
    try:
        return Loudspeaker(options.output_device)
    except NoSoundDevice as error:
        if options.play or options.live:
            raise
        print(f"mic_client: the reply is not played: {error}", file=sys.stderr)
        return None


def cancel_echo(microphone: Microphone, loudspeaker: Loudspeaker, *, wanted: bool | None) -> None:
    """Puts an echo canceller between the devices. With None for ``wanted``, only if there is one."""
    if wanted is False:
        return
    try:
        canceller = EchoCanceller(
            microphone_rate=microphone.sample_rate,
            loudspeaker_rate=loudspeaker.sample_rate,
            latency_ms=microphone.latency_ms + loudspeaker.latency_ms,
        )
    except NoEchoCanceller as error:
        if wanted:
            raise
        print(f"mic_client: no echo canceller, so use a headset: {error}", file=sys.stderr)
    else:
        microphone.canceller = loudspeaker.canceller = canceller


async def ask(
    session: ClientSession, options: argparse.Namespace, audio: Pcm16 | None, listener: Listener, tools: ToolRunner
) -> int:
    """Sends one request and waits for its answer, and for those to the results of tools that it calls."""

    async def send() -> None:
        if options.text is not None:
            await session.send_text(options.text, ref=QUESTION)
        else:
            async with aclosing(samples(audio, fast=options.fast)) as stream:
                async for piece in stream:
                    await session.send_audio(piece, ref=QUESTION)
        listener.input_ended()
        await session.finish()

    async def receive() -> None:
        calls_tools, name = True, QUESTION
        while calls_tools:
            async for event in session.response(name):
                listener.take(event)
                calls_tools = await tools.take(event)
            name = RESULTS

    await together(send, receive)
    if options.save and listener.reply:
        reply = Pcm16(bytes(listener.reply), listener.reply_rate)
        write_wav(options.save, reply)
        listener.display.show("saved", message=f"{reply.duration_ms:.0f} ms in {options.save}")
    if listener.loudspeaker:
        await listener.loudspeaker.played()
    if listener.error:
        return FAILED
    return complain("the reply has no sound; nothing was saved", FAILED) if options.save and not listener.reply else 0


async def samples(audio: Pcm16 | None, *, fast: bool) -> AsyncGenerator[bytes, None]:
    """Yields the audio of the file, in real time unless ``fast``, or of standard input."""
    if audio is None:
        async with aclosing(read_ahead()) as stream:
            async for piece in stream:
                yield piece
    elif fast:
        for piece in pieces(audio, piece_ms=PIECE_MS):
            yield piece
    else:
        async with aclosing(paced(pieces(audio, piece_ms=PIECE_MS), interval=PIECE_MS / 1000)) as stream:
            async for piece in stream:
                yield piece


async def receive(session: ClientSession, listener: Listener, tools: ToolRunner) -> None:
    """Takes what comes in a conversation. Raises ConnectionLost at its end."""
    async for event in session.events():
        listener.take(event)
        await tools.take(event)
    raise ConnectionLost("the server has closed the session")


async def recorded(
    microphone: Microphone, display: JsonDisplay, state: str, *, idle: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yields what the microphone records.

    Shows ``state`` when the first samples with a level have come: devices give zeros before they have woken up, and
    what is said meanwhile is lost. Tells it where there are none, and where audio was dropped because too much waited.
    """
    display.state("opening the microphone", idle=idle)
    silent_pieces, is_open, dropped = 0, False, microphone.dropped_pieces
    async for piece in microphone.pieces():
        if not is_open and any(piece):
            is_open = True
            display.state(state, idle=idle)
        elif not is_open:
            silent_pieces += 1
            if silent_pieces == SILENT_PIECES:
                display.show("note", message="nothing comes out of the microphone; is it switched off?")
        if microphone.dropped_pieces != dropped:
            lost_sec = (microphone.dropped_pieces - dropped) * PIECE_MS / 1000
            dropped = microphone.dropped_pieces
            display.show("note", message=f"the network does not keep up: {lost_sec:.1f} s of speech were not sent")
        yield piece


async def show_levels(microphone: Microphone, listener: Listener) -> None:
    """Shows the levels of both sides as they change, on a terminal."""
    while listener.display.live:
        await asyncio.sleep(LEVELS_SEC)
        speaker = listener.loudspeaker
        playing = speaker is not None and not speaker.buffer.idle
        listener.display.levels(microphone.level, speaker.level if speaker else 0.0, playing=playing)


async def talk(session: ClientSession, microphone: Microphone, listener: Listener, tools: ToolRunner) -> None:
    """Push-to-talk, until q or the end of standard input."""

    names = (f"speech-{number}" for number in count(1))

    async def speak() -> None:
        name = next(names)
        listener.asked.add(name)
        async with aclosing(recorded(microphone, listener.display, "hearing you")) as stream:
            async for piece in stream:
                await session.send_audio(piece, ref=name)
        listener.input_ended()
        await session.finish()

    async def follow_keys() -> None:
        speaking: asyncio.Task[None] | None = None
        listener.display.show("note", message="Enter: speak; Enter again: done; q and Enter: leave")
        listener.display.state("Enter: speak", idle=True)
        async with asyncio.TaskGroup() as group, aclosing(read_ahead()) as lines:
            async for line in lines:
                if line.strip().lower() == b"q":
                    break
                if speaking is None:
                    await interrupt(session, listener)
                    microphone.start()
                    speaking = group.create_task(speak())
                else:
                    microphone.stop()
                    await speaking
                    speaking = None
            if speaking:
                microphone.stop()
        raise Leave

    try:
        await together(
            follow_keys, lambda: receive(session, listener, tools), lambda: show_levels(microphone, listener)
        )
    except Leave:
        return


async def talk_freely(session: ClientSession, microphone: Microphone, listener: Listener, tools: ToolRunner) -> None:
    """Open microphone, until q or the end of standard input. Speech interrupts the answer."""
    config = session.config
    turns = config.turn_detection if config else None
    listener.interruptible = bool(config and turns and turns.interrupt_response and config.overlap == "interrupt")

    async def speak() -> None:
        microphone.start()
        async with aclosing(recorded(microphone, listener.display, "listening", idle=True)) as stream:
            async for piece in stream:
                await session.send_audio(piece)

    async def report() -> None:
        """Reports playback, by which the server paces audio and knows where a barge-in cut the answer."""
        while True:
            await asyncio.sleep(REPORT_SEC)
            if (played := listener.played) is not None:
                await session.acknowledge_output(request_id=played[0], played_ms=played[1])

    async def follow_keys() -> None:
        listener.display.show("note", message="speak; q and Enter: leave")
        async with aclosing(read_ahead()) as lines:
            async for line in lines:
                if line.strip().lower() == b"q":
                    break
        raise Leave

    try:
        await together(
            follow_keys,
            lambda: receive(session, listener, tools),
            lambda: show_levels(microphone, listener),
            speak,
            report,
        )
    except Leave:
        return
    finally:
        microphone.stop()


class Leave(Exception):
    """The user ends the conversation."""


async def interrupt(session: ClientSession, listener: Listener) -> None:
    """Stops each answer that runs, sounds or is to come, by its name, and reports how much of it was played."""
    if (played := listener.played) is not None:
        await session.acknowledge_output(request_id=played[0], played_ms=played[1])
    for request_id in listener.stoppable:
        await session.cancel(request_id)
    for name in sorted(listener.asked):
        await session.cancel(ref=name)
    listener.stop()


async def together(*actions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs actions concurrently. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for action in actions:
                group.create_task(action())
    except BaseExceptionGroup as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None


if __name__ == "__main__":
    sys.exit(main())
