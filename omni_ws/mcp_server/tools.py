"""The tools ``speak``, ``listen`` and ``converse``: their arguments, results and errors as MCP has them."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping
from inspect import cleandoc
from typing import Annotated, Any, Final, TypeVar

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.server.lowlevel import Server
from msgspec import Meta

from omni_ws import __version__
from omni_ws.audio.container import wav_header
from omni_ws.client import ConnectionFailed, ConnectionLost
from omni_ws.client.audio import Pcm16
from omni_ws.config.values import ConfigurationError
from omni_ws.errors import EngineFailed, InvalidValue, OmniError, UnsupportedParameter
from omni_ws.mcp_server.command import (
    MAX_LISTEN_SEC,
    ProgramVoice,
    Said,
)
from omni_ws.scenarios.servers import NoServer
from omni_ws.talk.sound_devices import NoSoundDevice

MAX_CHARACTERS: Final = 5000
_LISTEN_SEC: Final = 30.0

_Text = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
_Play = Annotated[
    bool,
    Meta(description="on the loudspeaker of this machine; false, or without a loudspeaker: the sound is returned"),
]
_Voice = Annotated[str, Meta(min_length=1, max_length=200, description="name of a voice of the server")]
_Seconds = Annotated[
    float, Meta(gt=0, le=MAX_LISTEN_SEC, description=f"the longest to listen, {MAX_LISTEN_SEC} at most")
]


class SpeakArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Speak a text aloud to the person at this machine, or return it as WAV audio."""

    text: Annotated[_Text, Meta(description="what is said, word for word")]
    play: _Play = True
    voice: _Voice | None = None


class ListenArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Listen to the person at this machine until a turn of theirs is over, and return the words.

    Needs a microphone that the person has allowed (--mic). With `file` it reads a recording instead, of the folder that
    the person has named (--files).
    """

    seconds: _Seconds = _LISTEN_SEC
    file: Annotated[str, Meta(min_length=1, max_length=500, description="name of a WAV file in that folder")] | None = (
        None
    )


class ConverseArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Ask the person at this machine a question aloud and return their spoken answer; or ask the voice server.

    `question` is for the person, and needs microphone and loudspeaker. `message` is for the voice server's own model,
    whose answer is returned as text, and spoken. Give one of the two. Each call is a conversation of its own.
    """

    question: Annotated[_Text, Meta(description="spoken to the person, whose answer is returned")] | None = None
    message: Annotated[_Text, Meta(description="sent to the voice server, whose answer is returned")] | None = None
    seconds: _Seconds = _LISTEN_SEC
    play: _Play = True
    voice: _Voice | None = None


_Arguments = TypeVar("_Arguments", bound=msgspec.Struct)


def mcp_server(voice: ProgramVoice) -> Server[Any]:
    """Return the MCP server with its three tools."""

    async def listed(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(name, taken) for name, (taken, _) in _TOOLS.items()])

    async def called(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in _TOOLS:
            raise MCPError(types.INVALID_PARAMS, f"no tool {params.name}; there are {', '.join(_TOOLS)}")
        taken, work = _TOOLS[params.name]
        try:
            return types.CallToolResult(content=await work(voice, _read(taken, params.arguments or {})))
        except (OmniError, ConnectionFailed, ConnectionLost, ConfigurationError, NoServer, NoSoundDevice) as error:
            return _failed(error)

    return Server("omni_ws", version=__version__, on_list_tools=listed, on_call_tool=called)


def _tool(name: str, taken: type[msgspec.Struct]) -> types.Tool:
    schema = msgspec.json.schema(taken)["$defs"][taken.__name__]
    del schema["title"]
    return types.Tool(
        name=name,
        description=cleandoc(schema.pop("description")),
        input_schema=schema,
        annotations=types.ToolAnnotations(destructive_hint=False, open_world_hint=name == "converse"),
    )


def _read(taken: type[_Arguments], arguments: Mapping[str, Any]) -> _Arguments:
    """Decode the arguments of a tool call as ``taken``. Raises InvalidValue."""
    try:
        return msgspec.convert(arguments, taken)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise InvalidValue(f"{place[:-1]}: {problem}" if place else problem, param=place[:-1] or None) from None


async def _speak(voice: ProgramVoice, arguments: SpeakArguments) -> list[types.ContentBlock]:
    said = await voice.speak(arguments.text, play=arguments.play, voice=arguments.voice)
    return [_text(_how(said)), *_sound(said.sound)]


async def _listen(voice: ProgramVoice, arguments: ListenArguments) -> list[types.ContentBlock]:
    if arguments.file is not None:
        return [_text(await voice.hear_file(arguments.file) or "(no words in the file)")]
    return [_text(await voice.listen(arguments.seconds) or f"(nothing was said in {arguments.seconds:g} s)")]


async def _converse(voice: ProgramVoice, arguments: ConverseArguments) -> list[types.ContentBlock]:
    match arguments.question, arguments.message:
        case str(question), None:
            if not arguments.play:
                raise InvalidValue("a question is always played: a person answers it", param="play")
            heard = await voice.ask_person(question, arguments.seconds, voice=arguments.voice)
            return [_text(heard or f"(nothing was said in {arguments.seconds:g} s)")]
        case None, str(message):
            said = await voice.ask(message, play=arguments.play, voice=arguments.voice)
            why = [] if said.why_unplayed is None else [_text(f"(not played: {said.why_unplayed})")]
            return [_text(said.text), *_sound(said.sound), *why]
    raise InvalidValue("give either a question, for the person, or a message, for the server", param="question")


#: The arguments of each tool, and what it does.
_TOOLS: Final[Mapping[str, tuple[type[Any], Callable[[ProgramVoice, Any], Awaitable[list[types.ContentBlock]]]]]] = {
    "speak": (SpeakArguments, _speak),
    "listen": (ListenArguments, _listen),
    "converse": (ConverseArguments, _converse),
}


def _how(said: Said) -> str:
    how = "" if said.why_unplayed is None else f", not played: {said.why_unplayed}"
    return f"{said.seconds:.1f} s of speech{', played on the loudspeaker' if said.sound is None else how}"


def _text(text: str) -> types.TextContent:
    return types.TextContent(text=text)


def _sound(sound: Pcm16 | None) -> list[types.ContentBlock]:
    if sound is None or not sound.samples:
        return []
    head = wav_header(sample_rate=sound.sample_rate, channels=sound.channels, data_bytes=len(sound.samples))
    return [types.AudioContent(data=base64.b64encode(head + sound.samples).decode(), mime_type="audio/wav")]


def _failed(error: Exception) -> types.CallToolResult:
    """Return an error of a tool as its result, for the model that has called the tool.

    The error's code is one of those in protocol/error_codes.md.
    """
    match error:
        case OmniError():
            told = error
        case NoSoundDevice():
            told = UnsupportedParameter(str(error))
        case _:
            told = EngineFailed(str(error))
    fields = {"code": told.code, "message": told.message, "param": told.param}
    return types.CallToolResult(
        content=[_text(f"{told.code}: {told.message}")],
        structured_content={"error": {name: value for name, value in fields.items() if value is not None}},
        is_error=True,
    )
