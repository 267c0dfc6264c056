"""The items of OpenAI's Realtime API: messages, calls of functions and their outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Final, Literal

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES, InputChunk, Modality
from omni_ws.errors import InvalidValue, UnsupportedParameter
from omni_ws.wire.openai_media import MediaUrl, media_by_url
from omni_ws.wire.realtime_events import base64_field, id_field, optional_id, text_field

#: What an item costs besides its content, and of that each part.
ITEM_OVERHEAD_BYTES: Final = 1024
PART_OVERHEAD_BYTES: Final = 256
# Tuples, because what is looked for may be anything that JSON has.
_ROLES: Final = ("system", "user", "assistant")
_TEXTS: Final = ("input_text", "output_text", "text")
_SPOKEN: Final = ("output_audio", "audio")


@dataclass(slots=True, kw_only=True)
class Item:
    """One item of a conversation.

    ``content`` is what a client is shown of a message. ``chunks`` is the input that it is for the engine: empty for
    what the assistant said, and for items whose request has been answered.
    """

    item_id: str
    kind: Literal["message", "function_call", "function_call_output"] = "message"
    role: str = ""
    status: str = "completed"
    content: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    #: The arguments of a call, or the output of a function.
    text: str = ""
    chunks: list[InputChunk] = field(default_factory=list)
    #: The request that it belongs to, where it has one.
    request_id: str | None = None

    @property
    def size(self) -> int:
        """The bytes that it is charged with: the memory that it takes."""
        texts = [value for part in self.content for value in part.values() if isinstance(value, str)]
        return (
            ITEM_OVERHEAD_BYTES
            + sum(map(getsizeof, (self.text, self.call_id, self.name, *texts)))
            + PART_OVERHEAD_BYTES * len(self.content)
            + sum(CHUNK_OVERHEAD_BYTES + len(chunk.payload) for chunk in self.chunks)
        )

    @property
    def message_text(self) -> str:
        """The words of a message: its texts, and the transcripts of its audio."""
        return " ".join(filter(None, (part.get("text") or part.get("transcript") for part in self.content)))

    def shown(self) -> dict[str, Any]:
        """The item as a client is shown it."""
        common = {"id": self.item_id, "object": "realtime.item", "type": self.kind, "status": self.status}
        match self.kind:
            case "message":
                return {**common, "role": self.role, "content": [dict(part) for part in self.content]}
            case "function_call":
                return {**common, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        return {**common, "call_id": self.call_id, "output": self.text}


def read_item(fields: Mapping[str, Any], new_id: str, *, place: str = "item") -> Item:
    """The item of ``conversation.item.create``, under its own id or else ``new_id``.

    Raises InvalidValue, UnsupportedParameter or UnsupportedFormat, naming the field.
    """
    item_id = optional_id(fields, "id", place=f"{place}.") or new_id
    kind = fields.get("type")
    if kind == "message":
        return _message(fields, item_id, place)
    if kind == "function_call":
        call_id, name = (id_field(fields, one, place=f"{place}.") for one in ("call_id", "name"))
        arguments = text_field(fields, "arguments", place=f"{place}.")
        return Item(item_id=item_id, kind=kind, call_id=call_id, name=name, text=arguments)
    if kind == "function_call_output":
        call_id = id_field(fields, "call_id", place=f"{place}.")
        output = fields.get("output")
        output = output if isinstance(output, str) else json.dumps(output)
        chunk = InputChunk(Modality.TEXT, output.encode(), tool_call_id=call_id)
        return Item(item_id=item_id, kind=kind, call_id=call_id, text=output, chunks=[chunk])
    if isinstance(kind, str):
        raise UnsupportedParameter(f"items of type {kind[:64]!r} are not supported here", param=f"{place}.type")
    raise InvalidValue(f"{place}.type must be a string", param=f"{place}.type")


def _message(fields: Mapping[str, Any], item_id: str, place: str) -> Item:
    role = fields.get("role")
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise InvalidValue(f"{place}.role must be system, user or assistant", param=f"{place}.role")
    content = fields.get("content")
    if not isinstance(content, list):
        raise InvalidValue(f"{place}.content must be a list", param=f"{place}.content")
    item = Item(item_id=item_id, role=str(role))
    for index, part in enumerate(content):
        where = f"{place}.content[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidValue(f"{where} must be an object", param=where)
        _add_part(item, part, where)
    return item


def _add_part(item: Item, part: Mapping[str, Any], where: str) -> None:
    kind = part.get("type")
    if kind in _TEXTS:
        text = text_field(part, "text", place=f"{where}.")
        shown = "output_text" if item.role == "assistant" else "input_text"
        item.content.append({"type": shown, "text": text})
        if item.role != "assistant":
            # A line break keeps two parts from running together.
            item.chunks.append(InputChunk(Modality.TEXT, (("\n" if item.chunks else "") + text).encode()))
    elif kind in _SPOKEN and item.role == "assistant":
        item.content.append({"type": "output_audio", "transcript": str(part.get("transcript") or "")})
    elif kind == "input_audio" and item.role == "user":
        audio = base64_field(part, "audio", place=f"{where}.")
        transcript = part.get("transcript")
        item.content.append({"type": "input_audio", "transcript": transcript if isinstance(transcript, str) else None})
        item.chunks.append(InputChunk(Modality.AUDIO, audio))
    elif kind == "input_image" and item.role == "user":
        image = media_by_url(part.get("image_url"), Modality.IMAGE, f"{where}.image_url")
        if isinstance(image, MediaUrl):
            raise UnsupportedParameter("images must be data: URLs here", param=f"{where}.image_url")
        item.content.append({"type": "input_image"})
        item.chunks.append(image)
    else:
        raise InvalidValue(f"{where}.type {str(kind)[:64]!r} does not fit the role {item.role}", param=f"{where}.type")
