"""Asynchronous client of the native WebSocket.

``async with connect(url) as session`` opens a :class:`ClientSession`. It numbers input, respects the server's credit,
acknowledges output, and can resume a session whose connection is lost.
"""

from omni_ws.client.connection import DEFAULT_URL, ConnectionFailed, ConnectionLost, Endpoint, ServerError
from omni_ws.client.events import (
    Answer,
    AudioChunk,
    Backchannel,
    Closing,
    ErrorEvent,
    Event,
    Final,
    InputAck,
    Reconnected,
    Reconnecting,
    ResponseStarted,
    ResumableChanged,
    Resumed,
    SpeechConfirmed,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    TextChunk,
    ToolCallChunk,
    TranscriptChunk,
    TranscriptView,
)
from omni_ws.client.session import ClientLimits, ClientSession, connect
from omni_ws.core.chunks import AnswerWarning, UrlCitation

__all__ = [
    "DEFAULT_URL",
    "Answer",
    "AnswerWarning",
    "AudioChunk",
    "Backchannel",
    "ClientLimits",
    "ClientSession",
    "Closing",
    "ConnectionFailed",
    "ConnectionLost",
    "Endpoint",
    "ErrorEvent",
    "Event",
    "Final",
    "InputAck",
    "Reconnected",
    "Reconnecting",
    "ResponseStarted",
    "ResumableChanged",
    "Resumed",
    "ServerError",
    "SpeechConfirmed",
    "SpeechDismissed",
    "SpeechStarted",
    "SpeechStopped",
    "TextChunk",
    "ToolCallChunk",
    "TranscriptChunk",
    "TranscriptView",
    "UrlCitation",
    "connect",
]
