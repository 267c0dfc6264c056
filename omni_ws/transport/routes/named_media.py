"""Media that a request body refers to: files below one folder, and URLs of hosts that the operator lists."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from omni_ws.config.model import HttpConfig, MediaDomains
from omni_ws.core.chunks import InputChunk
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidValue, OmniError, PayloadTooLarge, UnsupportedParameter
from omni_ws.transport.routes.media_fetch import Charge, MediaFetcher
from omni_ws.wire.openai_fields import MediaFile, MediaUrl, NamedMedia


class MediaReader:
    """Reads the media that request bodies refer to.

    All media of one request together may have ``http.max_body_bytes`` and take ``http.media_timeout_sec``.
    """

    def __init__(self, config: HttpConfig, fetcher: MediaFetcher | None = None) -> None:
        self._config = config
        self._fetcher = fetcher or MediaFetcher(MediaDomains(config.media_domains))

    async def read(self, items: Sequence[InputChunk | NamedMedia], charge: Charge) -> list[InputChunk]:
        """Replace references in ``items`` by the media, in order. Raises an OmniError that names the field.

        ``charge`` is called with the bytes held in all, before they are read.
        """
        chunks: list[InputChunk] = []
        held = 0

        def charge_more(size: int) -> None:
            charge(held + size)

        deadline = asyncio.get_running_loop().time() + self._config.media_timeout_sec
        for item in items:
            if isinstance(item, InputChunk):
                chunks.append(item)
                continue
            room = self._config.max_body_bytes - held
            try:
                match item:
                    case MediaFile():
                        chunk = item.chunk(await self._file(item.path, room, charge_more))
                    case MediaUrl():
                        chunk = item.chunk(*await self._fetched(item.url, room, charge_more, deadline))
            except OmniError as error:
                error.param = item.place
                raise
            held += len(chunk.payload)
            charge(held)
            chunks.append(chunk)
        return chunks

    async def _file(self, path: str, room: int, charge: Charge) -> bytes:
        with await run_work(Work.FILES, _open_below, self._config.media_root, path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > room:
                raise PayloadTooLarge(f"the file exceeds {room} bytes")
            charge(size)
            return await run_work(Work.FILES, file.read, size)

    async def _fetched(self, url: str, room: int, charge: Charge, deadline: float) -> tuple[bytes, str]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fetcher.fetch(url, max_bytes=room, charge=charge)
        except TimeoutError:
            limit = self._config.media_timeout_sec
            raise InvalidValue(f"fetching the media took more than {limit:g} s") from None


def _open_below(root: Path | None, path: str) -> BinaryIO:
    """Open the file at ``path``, absolute or relative to ``root``; after resolving links it must be inside ``root``.

    Raises UnsupportedParameter when ``root`` is None. Otherwise raises InvalidValue; for a path outside ``root`` the
    error does not depend on whether the file exists. The caller closes the file.
    """
    if root is None:
        raise UnsupportedParameter("file paths are not supported on this server; send a data: URL")
    try:
        folder = root.resolve()
        place = (folder / path).resolve()
        if not place.is_relative_to(folder):
            raise InvalidValue("the path is outside the folder of allowed files")
        if not place.is_file():  # reading a pipe might block forever
            raise InvalidValue("file not found")
        return open(place, "rb", opener=_open_without_links)  # the caller closes it
    except (OSError, ValueError, RuntimeError):
        raise InvalidValue("file not found") from None


def _open_without_links(path: str, flags: int) -> int:
    """Open a resolved path. A link there was created after the check, and is refused."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
