"""The names of the moments of an answer, as finals have them (protocol/README.md, "Times of an answer")."""

from __future__ import annotations

from typing import Final

#: The moments by their names on the wire, in the order in which they follow one another in most answers.
MOMENTS: Final = (
    "speech_ended",
    "input_ended",
    "turn_decided",
    "engine_started",
    "transcript_guessed",
    "transcript_settled",
    "llm_asked",
    "first_token",
    "first_clause",
    "first_audio_made",
    "first_audio_sent",
    "first_audio_played",
    "last_audio_sent",
    "interrupted",
)

#: What is told with them, and is no moment.
BESIDE_MOMENTS: Final = ("turn_decided_audio_ms", "discarded_ms", "discarded_tokens")
