"""UrlImages: fetches the images that client events name by URL, while the events that depend on them wait."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from omni_ws.config.model import HttpConfig
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.quota import ByteBudget, Share, memory_of
from omni_ws.engine.threads import Work, run_work
from omni_ws.errors import InvalidRequest, InvalidValue, OmniError
from omni_ws.service.failure import unexpected
from omni_ws.transport.http.media_fetch import MediaReader
from omni_ws.wire.openai_fields import MediaUrl
from omni_ws.wire.realtime_events import items_in

#: The events that wait for an image that an event before them names; others overtake it.
WAITING_KINDS: Final = frozenset(
    {"conversation.item.create", "conversation.item.retrieve", "conversation.item.delete", "response.create"}
)
#: How many of them may wait, and how many images one of them may name.
MAX_WAITING: Final = 64
MAX_IMAGES: Final = 16
#: The memory of an image while it becomes a data: URL, for each of its bytes.
_COPIES: Final = 3


class UrlImages:
    """Holds events that name images by URL, and those behind them; puts the images in, and passes the events on.

    ``handle`` gets each event with the time of its arrival, once it is whole. ``refuse`` gets the error of an event
    that is refused, or whose images cannot be fetched; ``end`` an error that ends the session.
    """

    def __init__(
        self,
        config: HttpConfig,
        account: ByteBudget,
        handle: Callable[[Mapping[str, Any], float], None],
        refuse: Callable[[OmniError, Mapping[str, Any]], None],
        end: Callable[[OmniError], None],
    ) -> None:
        self._reader = MediaReader(config)
        self._handle, self._refuse, self._end = handle, refuse, end
        #: The events in order, each with its arrival and its size.
        self._waiting: deque[tuple[dict[str, Any], float, int]] = deque()
        self._share = Share(account)
        self._task: asyncio.Task[None] | None = None

    def holds(self, event: Mapping[str, Any], *, now: float) -> bool:
        """Keep an event if it has to wait, and return whether it has. Raises InvalidValue and EngineOverloaded."""
        if event["type"] not in WAITING_KINDS or not (self._waiting or any(True for _ in _named(event))):
            return False
        if len(self._waiting) >= MAX_WAITING:
            raise InvalidValue(f"at most {MAX_WAITING} events may wait for images", param="type")
        size = memory_of(event)
        self._share.resize(self._share.size + size)
        self._waiting.append((dict(event), now, size))
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="images of a Realtime session")
        return True

    def close(self) -> None:
        """Drop what waits."""
        if self._task is not None:
            self._task.cancel()
        self._waiting.clear()
        self._share.resize(0)

    async def _read(self) -> None:
        try:
            while self._waiting:
                event, now, _ = self._waiting[0]
                error: OmniError | None = None
                try:
                    await self._fetch(event)
                except OmniError as refusal:
                    error = refusal
                self._waiting.popleft()
                self._share.resize(sum(size for _, _, size in self._waiting))
                if error is not None:
                    self._refuse(error, event)
                else:
                    self._pass_on(event, now)
        except Exception as failure:
            self._end(unexpected(failure, where="the images of a Realtime session"))
        finally:
            self._task = None

    def _pass_on(self, event: Mapping[str, Any], now: float) -> None:
        try:
            self._handle(event, now)
        except InvalidRequest as error:
            self._refuse(error, event)
        except OmniError as error:
            self._end(error)

    async def _fetch(self, event: Mapping[str, Any]) -> None:
        """Replace the URLs of images in ``event`` by ``data:`` URLs. Raises an OmniError that names the field."""
        named = list(_named(event))
        if len(named) > MAX_IMAGES:
            raise InvalidValue(f"at most {MAX_IMAGES} images may be named by URL", param=named[MAX_IMAGES][1].place)
        size = self._share.size
        images = await self._reader.read(
            [url for _, url in named], lambda held: self._share.resize(size + _COPIES * held)
        )
        for (part, _), image in zip(named, images, strict=True):
            part["image_url"] = await run_work(Work.BODIES, _data_url, image)


def _data_url(image: InputChunk) -> str:
    return f"data:{sniff_image(image.payload)};base64,{base64.b64encode(image.payload).decode()}"


def _named(event: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], MediaUrl]]:
    """Yield the parts of messages in ``event`` that name an image by URL, each with the URL."""
    for place, item in items_in(event):
        content = item.get("content") if isinstance(item, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            url = part.get("image_url") if isinstance(part, dict) and part.get("type") == "input_image" else None
            if isinstance(url, str) and url[:16].strip().lower().startswith(("http:", "https:")):
                yield part, MediaUrl(url.strip(), Modality.IMAGE, f"{place}.content[{index}].image_url")
