"""The limits of an InputStream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """The most that an InputStream accepts, in chunks and bytes, and how long it waits, in seconds."""

    #: How far ahead of a missing chunk the others may be.
    reorder_window: int = 256
    #: How long a chunk may be missing before the others.
    reorder_timeout: float = 10
    #: How long nothing may arrive.
    session_timeout: float = 300
    max_chunk_bytes: int = 4 << 20
    #: Bytes that the engine has not taken over yet.
    max_held_bytes: int = 64 << 20
    #: Bytes of the whole input: of a session of one request, else of each request by itself; None for no limit.
    max_total_bytes: int | None = None
