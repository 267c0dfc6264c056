"""ConversationLimits: bounds on what one conversation holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_ws.core.input_stream import StreamLimits

#: Chunks of one request that may wait for the engine: 87 minutes of speech in pieces of 20 ms. The limit in bytes
#: leaves out the overhead of a chunk, and chunks may be tiny.
MAX_WAITING_CHUNKS: Final = 1 << 18
#: Results of tools in one request, which are kept by their ids until it ends, also where they are empty.
MAX_TOOL_RESULTS: Final = 1 << 10
#: How long a turn whose answer was cut off may be written down.
ASR_TIMEOUT_SEC: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """The limits of one conversation; those of its input stream are in ``stream``."""

    stream: StreamLimits
    #: Requests that may wait behind the one that is being answered.
    max_pending_requests: int = 4
    #: Tokens, by ``estimate_tokens`` and a rate of speech, of the history that the engine gets; 0 for none.
    max_history_tokens: int = 4096
    #: Seconds that recognition of a turn may take whose answer was cut off.
    asr_timeout_sec: float = ASR_TIMEOUT_SEC
