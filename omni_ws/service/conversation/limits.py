"""What one conversation may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_ws.core.stream_limits import StreamLimits

#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes does
#: not count what a chunk itself costs, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    stream: StreamLimits
    max_pending_requests: int = 4
    max_history_tokens: int = 4096
