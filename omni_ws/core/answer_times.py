"""The names of the moments of an answer, and of the parts between them (protocol/README.md, "Times of an answer")."""

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

#: The parts of the time from the end of the speech to the first sound, each with the moment at which it ends.
PARTS: Final = (
    ("turn_decision", "turn_decided"),
    ("queue", "engine_started"),
    ("recognition", "transcript_settled"),
    ("llm_first_token", "first_token"),
    ("first_clause", "first_clause"),
    ("voice", "first_audio_made"),
    ("sending", "first_audio_sent"),
    ("playing", "first_audio_played"),
)

#: What is told with the moments, and is no moment.
BESIDE_MOMENTS: Final = ("turn_decided_audio_ms", "discarded_ms", "discarded_tokens")
