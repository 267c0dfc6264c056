"""What the benchmarks of speech count, and the sound that they make."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.speech_clips import clip_samples

from benchmarks.speech.debian import DebianSource, files_of
from benchmarks.speech.degraded import far, noisy, telephone
from benchmarks.speech.wordless import SOUNDS
from benchmarks.voices import sentences
from omni_ws.audio.pcm import Samples
from omni_ws.engine.spoken.speakable_text import spoken_form
from omni_ws.scenarios.speech import (
    WordErrors,
    total,
    word_errors,
)
from omni_ws.weights import (
    Fetching,
    WeightsError,
    read_lock,
)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("go forward ten meters", "Go forward 10 metres."),
        ("mister john dashwood", "Mr. John Dashwood,"),
        ("thirty six dollars", "$36"),
        ("two nine three four zero", "29340"),
        ("two nine three four oh", "2 9 3 4 0"),
        ("nineteen oh one", "1901"),
        ("one thousand nine hundred and one", "1901"),
        ("a hundred and five", "105"),
        ("hundredth", "100th."),
        ("please leave a voice mail", "Please leave a voicemail."),
        ("the P.B.X. is busy", "The PBX is busy."),
        ("at three thirty p m", "At 3.30pm."),
        ("it's o'clock", "It’s o'clock!"),
        ("", ""),
    ],
)
def test_other_spellings_of_the_same_words_are_right(said: str, heard: str) -> None:
    errors = word_errors(said, heard)
    assert (errors.wrong, errors.differences) == (0, ())


@pytest.mark.parametrize(
    ("said", "heard", "differences"),
    [
        ("ten of clubs", "10 of clothes.", ("clubs → clothes",)),
        ("ten of clubs", "10 of clubs you", ("+you",)),
        ("ten of clubs", "10 clubs", ("-of",)),
        ("ten of clubs", "", ("-ten", "-of", "-clubs")),
        ("", "Thank you.", ("+thank", "+you")),
        ("seven hundred", "70", ("seven → seventy", "-hundred")),
        ("he ate it", "he's eight", ("he → he's", "ate → eight", "-it")),
    ],
)
def test_what_was_heard_otherwise_is_counted_and_told(said: str, heard: str, differences: tuple[str, ...]) -> None:
    errors = word_errors(said, heard)
    assert errors.differences == differences
    assert errors.wrong == len(differences)
    assert errors.words == len(said.split())


def test_errors_of_several_recordings_add_up() -> None:
    summed = total([word_errors("ten of clubs", "ten clubs"), word_errors("go", "no")])
    assert summed == WordErrors(2, 4, ("-of", "go → no"))
    assert summed.rate == 0.5
    assert WordErrors(0, 0).rate == 0
    assert WordErrors(1, 0).rate == 1


def test_sentences_are_told_as_the_server_reads_them_aloud() -> None:
    """Their spoken forms were written by hand; a difference is a fault of one of them."""
    for sentence in sentences():
        read = "".join(piece.text for piece in spoken_form(sentence.written))
        assert word_errors(sentence.spoken, read).wrong == 0, sentence.written
    assert len(sentences()) == 50


@pytest.mark.parametrize("change", [far, noisy, telephone])
def test_a_recording_is_made_worse_in_the_same_way_each_time(change: Callable[[Samples], Samples]) -> None:
    clip = clip_samples("goforward")
    worse = change(clip)
    assert np.array_equal(worse, change(clip))
    assert np.max(np.abs(worse)) <= 1
    # The speech is still in it, and something else too.
    likeness = np.corrcoef(clip, worse[: len(clip)])[0, 1]
    assert 0.3 < likeness < 0.98


@pytest.mark.parametrize("name", SOUNDS)
def test_made_sound_is_as_long_as_asked_for_and_within_full_scale(name: str) -> None:
    sound = SOUNDS[name](3)
    assert sound.shape == (48_000,)
    assert sound.dtype == np.float32
    assert np.max(np.abs(sound)) <= 1
    assert np.array_equal(sound, SOUNDS[name](3))
    assert bool(np.any(sound)) == (name != "silence")


def test_files_of_a_debian_package(tmp_path: Path) -> None:
    package = tmp_path / "sounds_1_all.deb"
    package.write_bytes(debian_package({"./usr/share/a.txt": b"words", "./usr/share/b.wav": bytes(1000)}))
    assert dict(files_of(package)) == {"usr/share/a.txt": b"words", "usr/share/b.wav": bytes(1000)}


def test_what_is_no_debian_package(tmp_path: Path) -> None:
    package = tmp_path / "sounds_1_all.deb"
    package.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="not a Debian package"):
        dict(files_of(package))


@pytest.mark.parametrize(
    ("name", "apt_get", "problem"),
    [
        ("sounds_1_all.deb", "echo 'E: no such version' >&2; exit 100", "E: no such version .*apt-get update"),
        ("sounds_1_all.deb", "echo other >sounds_1_all.deb", "is not the file that was pinned"),
        ("sounds_1_all.deb", None, "no apt-get"),
        ("sounds.wav", "exit 0", "there are none"),
    ],
)
def test_what_cannot_be_downloaded_from_debian(
    name: str, apt_get: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    if apt_get is not None:
        (programs / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
        (programs / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    (weights,) = read_lock(
        '[sounds]\nabout = ""\nlicence = ""\nattribution = ""\n'
        f'[sounds.files]\n"{name}" = {{ bytes = 3, sha256 = "{"0" * 64}" }}\n'
    ).values()
    with pytest.raises(WeightsError, match=problem):
        DebianSource().fetch(weights, weights.files, tmp_path, Fetching())
    assert list(tmp_path.iterdir()) == [programs]


def debian_package(files: dict[str, bytes]) -> bytes:
    """As dpkg-deb makes it (deb(5)): three members, each padded to an even length."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": lzma.compress(packed.getvalue())}
    package = b"!<arch>\n"
    for name, content in members.items():
        package += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        package += content + b"\n" * (len(content) % 2)
    return package
