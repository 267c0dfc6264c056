from collections.abc import Sequence

import pytest

from omni_ws.engine.tts.espeak import (
    Espeak,
    WordTimes,
)

Event = tuple[str, int] | tuple[str, int, int]


def words_of(text: str, events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """``events`` are ("begins", position, ms), ("sounds", ms), ("pauses", ms) and ("ends", ms)."""
    times = WordTimes(text)
    ended = []
    for event in events:
        match event:
            case ("begins", position, at_ms):
                ended.append(times.begins(position, at_ms))
            case ("sounds", _):
                times.sounds()
            case ("pauses", at_ms):
                times.pauses(at_ms)
            case ("ends", at_ms):
                ended.append(times.ends(at_ms))
    return [(word.text, word.start_ms, word.end_ms) for word in ended if word is not None]


def beginnings(*positions: int) -> list[Event]:
    """Something begins at each of these every 100 ms, and the last ends after as long."""
    return [*(("begins", position, 100 * at) for at, position in enumerate(positions)), ("ends", 100 * len(positions))]


@pytest.mark.parametrize(
    ("text", "positions", "words"),
    [
        ("go now", [0, 3], ["go", "now"]),
        ("21, 22.", [0, 1, 4, 5], ["21", "22"]),
        ("is 3.5 and", [0, 3, 4, 4, 7], ["is", "3.5", "and"]),
        ("x 1234567 y", [0, 2, 3, 2, 3, 10], ["x", "1234567", "y"]),
        ("It's £20 (or so).", [0, 6, 5, 9, 13], ["It's", "£20", "or", "so"]),
        ("things—well-known … “so”", [0, 7, 20], ["things", "well-known", "so"]),
        ("你好 我是人。", [0, 3, 4, 5], ["你好", "我", "是", "人"]),
        ("今日は", [0, 0, 0], ["今日は"]),
        ("مرحبا بكم", [0, 6], ["مرحبا", "بكم"]),
        ("a - b", [0, 2, 4], ["a", "-", "b"]),
        ("a ? b", [0, 2, 4], ["a", "?", "b"]),
        # Places outside of all words: before one, and behind the last.
        ("  a b  ", [0, 3, 6], ["a", "b"]),
        ("a", [99], ["a"]),
        ("", [0], []),
        (" … ", [1], []),
    ],
)
def test_words_are_those_of_the_text(text: str, positions: list[int], words: list[str]) -> None:
    found = words_of(text, beginnings(*positions))
    assert [word for word, _, _ in found] == words
    assert all(start < end for _, start, end in found)


def test_a_word_ends_where_its_pause_begins() -> None:
    events: list[Event] = [
        ("begins", 0, 0), ("sounds", 0), ("pauses", 300), ("pauses", 350), ("ends", 600),
        ("begins", 5, 600), ("sounds", 600), ("pauses", 700), ("sounds", 750), ("begins", 9, 800), ("sounds", 800),
        ("pauses", 1200), ("ends", 1500),
    ]  # fmt: skip
    assert words_of("one, two three", events) == [("one", 0, 300), ("two", 600, 800), ("three", 800, 1200)]


def test_a_number_goes_on_after_a_pause() -> None:
    events: list[Event] = [("begins", 0, 0), ("pauses", 100), ("begins", 2, 200), ("pauses", 300), ("ends", 400)]
    assert words_of("1,234", events) == [("1,234", 0, 300)]


def test_what_is_not_heard_has_no_time() -> None:
    events: list[Event] = [("begins", 0, 50), ("pauses", 50), ("begins", 2, 400), ("sounds", 400), ("ends", 500)]
    assert words_of("* a", events) == [("a", 400, 500)]
    assert words_of("a", [("sounds", 0), ("pauses", 10), ("ends", 20)]) == []


def test_words_are_pronounced_at_their_places() -> None:
    pytest.importorskip("espeakng_loader")
    words = Espeak().pronounced("¿Qué tal, señor? Bien.", "Spanish (Spain)")
    assert [(word.position, "".join(word.phonemes)) for word in words] == [
        (1, "kˈe"),
        (5, "tˈal"),
        (10, "seɲˈoɾ"),
        (17, "bjˈen"),
    ]
    assert Espeak().pronounced("", "Spanish (Spain)") == []
