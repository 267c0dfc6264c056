"""What a list says of a call, by recordings that were made line by line."""

from __future__ import annotations

from pathlib import Path

import orjson
from support.made_calls import Said, write_call

from omni_ws.calls.reading import MAX_LETTERS, Glance, glance


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_first_words_and_the_number_of_turns(tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    write_call(folder, [Said("Good morning.", "Hello."), Said("What time is it?", "Noon."), Said("Thanks.", "Bye.")])
    path = only_file(folder)
    size = path.stat().st_size
    assert glance(path, size) == Glance("Good morning.", 3)
    # What was written after the file was opened is not looked at.
    assert glance(path, path.read_bytes().index(b"response_started")).turns == 0


def test_words_are_cut_at_their_limit(tmp_path: Path) -> None:
    for letters, folder in ((MAX_LETTERS, tmp_path / "all"), (MAX_LETTERS + 1, tmp_path / "cut")):
        write_call(folder, [Said("x" * letters, "Hello.")])
        path = only_file(folder)
        assert glance(path, path.stat().st_size).first_words == "x" * MAX_LETTERS


def test_what_was_typed_counts_and_what_is_broken_does_not(tmp_path: Path) -> None:
    typed = orjson.dumps({"type": "input_chunk", "sequence_id": 0, "modality": "text", "text": "typed"}).decode()
    folder = tmp_path / "calls"
    write_call(folder, [Said('Say "response_started" and "transcript".', "Well.")], frame=typed)
    path = only_file(folder)
    assert glance(path, path.stat().st_size) == Glance("typed", 1)
    broken = tmp_path / "broken.ndjson"
    broken.write_bytes(b'{"event":"out","at":1,"text":"{\\"modality\\":\\"transcript\\"\n\xff\\"transcript\\"\n')
    assert glance(broken, 1000) == Glance(None, 0)
    assert glance(tmp_path / "gone", 1000) == Glance(None, 0)
