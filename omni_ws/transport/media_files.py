"""The files that a body names, read where waiting for a disk holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omni_ws.config.model import HttpConfig
from omni_ws.core.chunks import InputChunk
from omni_ws.errors import OmniError
from omni_ws.media.files import read_below
from omni_ws.wire.openai_media import MediaFile


async def read_files(config: HttpConfig, items: Sequence[InputChunk | MediaFile]) -> list[InputChunk]:
    """``items`` with their files in them, all together no larger than a body may be.

    Raises an OmniError that names the field.
    """
    if not any(isinstance(item, MediaFile) for item in items):
        return [item for item in items if isinstance(item, InputChunk)]
    return await asyncio.to_thread(_read_all, config, items)


def _read_all(config: HttpConfig, items: Sequence[InputChunk | MediaFile]) -> list[InputChunk]:
    room = config.max_body_bytes
    chunks: list[InputChunk] = []
    for item in items:
        if isinstance(item, InputChunk):
            chunks.append(item)
            continue
        try:
            data = read_below(config.media_root, item.path, max_bytes=room)
        except OmniError as error:
            error.param = item.place
            raise
        room -= len(data)
        chunks.append(item.chunk(data))
    return chunks
