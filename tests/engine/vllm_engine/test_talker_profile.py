from pathlib import Path

import pytest

from omni_ws.engine.vllm.talker import MAYA1, ORPHEUS, find_profile
from omni_ws.errors import EngineFailed, InvalidValue

GENERIC = """
prefix = [3, 4]
suffix = [5]
stop = [6]
text = "<{voice}> {text}"
first_token = 300
codebook_size = 64
slots = [0, 1, 1]
codec = "codec"
[voices]
ada = "a calm voice"
bob = "a loud voice"
[sampling]
temperature = 0.5
"""


@pytest.fixture
def generic(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(GENERIC)
    return path


@pytest.mark.parametrize(
    ("wanted", "model", "profile"),
    [
        ("orpheus", "/models/x", ORPHEUS),
        ("maya1", "x", MAYA1),
        (None, "canopylabs/orpheus-3b-0.1-ft", ORPHEUS),
        (None, "maya-research/Maya1", MAYA1),
    ],
)
def test_known_profiles(wanted: str | None, model: str, profile: object) -> None:
    assert find_profile(wanted, model) is profile


def test_the_prompts_of_the_known_families() -> None:
    assert ORPHEUS.prompt([11, 12]) == [128259, 128000, 11, 12, 128009, 128260, 128261, 128257]
    assert ORPHEUS.spoken_text("Hello.", None) == "tara: Hello."
    assert ORPHEUS.spoken_text("{text}", "leo") == "leo: {text}"
    assert MAYA1.spoken_text("Hello.", "man").startswith('<description="Realistic male voice')
    assert MAYA1.spoken_text("Hello.", "man").endswith('."> Hello.')
    for profile in (ORPHEUS, MAYA1):
        assert profile.stop == (128258,)
        assert profile.layout.first_token == 128266
        assert profile.layout.end_token - 1 == 156937


def test_text_cannot_spell_control_or_codec_tokens() -> None:
    assert ORPHEUS.prompt([11, 128258, 128009, 128266, 156937, 12])[2:4] == [11, 12]


def test_a_profile_from_a_file(generic: Path) -> None:
    (generic.parent / "codec").mkdir()
    profile = find_profile(str(generic), "anything")
    assert profile.name == "mine"
    assert profile.spoken_text("Hi.", None) == "<a calm voice> Hi."
    assert profile.spoken_text("Hi.", "bob") == "<a loud voice> Hi."
    assert profile.prompt([9]) == [3, 4, 9, 5]
    assert profile.layout.codes_per_frame == (1, 2)
    assert profile.codec == str(generic.parent / "codec")
    assert profile.sampling == {"temperature": 0.5}


def test_a_voice_that_there_is_not() -> None:
    with pytest.raises(InvalidValue, match="unknown voice 'eve'") as caught:
        ORPHEUS.spoken_text("Hi.", "eve")
    assert caught.value.param == "voice"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("stop = [6]", "stop = []"),
        ("stop = [6]", "stop = [300]"),
        ("prefix = [3, 4]", 'prefix = "34"'),
        ("prefix = [3, 4]", "prefix = [-1]"),
        ('text = "<{voice}> {text}"', 'text = "{nobody} {text}"'),
        ('text = "<{voice}> {text}"', 'text = "no place"'),
        ("first_token = 300", ""),
        ("first_token = 300", "first_token = -4"),
        ("slots = [0, 1, 1]", "slots = [0, 2]"),
        ('codec = "codec"', ""),
        ("stop = [6]", "stop = [6]\nunknown = 1"),
        ("stop = [6]", "stop = ["),
    ],
)
def test_files_that_hold_no_profile(generic: Path, before: str, after: str) -> None:
    generic.write_text(GENERIC.replace(before, after))
    with pytest.raises(EngineFailed, match=r"mine\.toml"):
        find_profile(str(generic), "anything")


def test_no_profile_at_all(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"no profile known for the Talker some-model; .*: orpheus, maya1"):
        find_profile(None, "some-model")
    with pytest.raises(EngineFailed, match=r"Talker profile .*absent\.toml not found"):
        find_profile(str(tmp_path / "absent.toml"), "some-model")
