"""What an InputStream takes, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """``max_held_bytes`` caps what the engine has not taken over yet, ``max_total_bytes`` all that ever comes, where it
    is not None. Times in seconds."""

    reorder_window: int = 256
    reorder_timeout: float = 10
    session_timeout: float = 300
    max_chunk_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    max_total_bytes: int | None = None
