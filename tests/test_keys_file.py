"""Keys file: valid entries, and errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from omni_ws.config import ApiKey, ConfigurationError, configured_keys, load, load_keys


def write(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text, encoding="utf-8")
    return file


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def test_keys_in_plain_text_and_as_digests(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        f"""
        [[keys]]
        name = "ann"
        key = "wörd"
        max_sessions = 2
        requests_per_sec = 0.5
        burst = 3
        input_bytes_per_sec = "64KiB"
        tokens_per_day = 100000
        audio_seconds_per_day = 3600
        max_session_sec = 0.5
        admin = true
        priority = true
        [[keys]]
        name = "bob"
        key_sha256 = "{sha256("bob's").hex().upper()}"
        """,
    )
    assert load_keys(file) == (
        ApiKey(
            name="ann",
            key_sha256=sha256("wörd"),
            max_sessions=2,
            requests_per_sec=0.5,
            burst=3,
            input_bytes_per_sec=65536,
            tokens_per_day=100_000,
            audio_seconds_per_day=3600,
            max_session_sec=0.5,
            admin=True,
            priority=True,
        ),
        ApiKey(name="bob", key_sha256=sha256("bob's")),
    )


def test_the_single_key_stands_beside_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[[keys]]\nname = "ann"\nkey = "a"')
    assert configured_keys(load().config) == ()
    config = load(["--keys-file", str(file)], {"OMNI_WS_API_KEY": "one"}).config
    assert [(key.name, key.key_sha256, key.admin) for key in configured_keys(config)] == [
        ("api_key", sha256("one"), False),
        ("ann", sha256("a"), False),
    ]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('key = "s3cret"', "keys entry 1: name is missing"),
        ('name = "ann"', "exactly one of key and key_sha256 is needed"),
        ('name = "ann"\nkey = "s3cret"\nkey_sha256 = "' + "0" * 64 + '"', "exactly one of key and key_sha256"),
        ('name = "ann"\nkey = ""', "key must be a non-empty text"),
        ('name = ""\nkey = "s3cret"', "name must be a non-empty text"),
        ('name = "ann"\nkey_sha256 = "s3cret"', "key_sha256 must be 64 hexadecimal digits"),
        ('name = "ann"\nkey = "s3cret"\nmax_sessions = 0', "max_sessions must be a whole number above 0"),
        ('name = "ann"\nkey = "s3cret"\nmax_sessions = 1.5', "max_sessions must be a whole number above 0"),
        (f'name = "ann"\nkey = "s3cret"\nmax_sessions = {"9" * 400}', "max_sessions must be a whole number above 0"),
        ('name = "ann"\nkey = "s3cret"\nburst = 2', "burst needs requests_per_sec, which is missing"),
        ('name = "ann"\nkey = "s3cret"\nburst = true', "burst must be a whole number above 0"),
        ('name = "ann"\nkey = "s3cret"\nrequests_per_sec = inf', "requests_per_sec must be a number above 0"),
        ('name = "ann"\nkey = "s3cret"\ninput_bytes_per_sec = "fast"', "input_bytes_per_sec must be a size above 0"),
        ('name = "ann"\nkey = "s3cret"\nadmin = "yes"', "admin must be true or false"),
        ('name = "ann"\nkey = "s3cret"\nmax_session = 1', "unknown key max_session; did you mean max_sessions?"),
        ('name = "ann"\nkey = "s3cret"\n[[keys]]\nname = "ann"\nkey = "b"', "entry 2 (ann): an earlier key has"),
        (
            'name = "ann"\nkey = "s3cret"\n[[keys]]\nname = "bob"\nkey = "s3cret"',
            "entry 2 (bob): an earlier entry has the same key",
        ),
    ],
)
def test_bad_entries_are_named_and_keys_are_not_shown(tmp_path: Path, entry: str, problem: str) -> None:
    file = write(tmp_path, f"[[keys]]\n{entry}")
    with pytest.raises(ConfigurationError) as caught:
        load_keys(file)
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("name", "key"), [("api_key", "other"), ("ann", "s3cret")])
def test_a_key_beside_the_file_has_a_name_of_its_own(tmp_path: Path, name: str, key: str) -> None:
    file = write(tmp_path, f'[[keys]]\nname = "{name}"\nkey = "{key}"\ntokens_per_day = 1')
    config = load(["--keys-file", str(file)], {"OMNI_WS_API_KEY": "s3cret"}).config
    with pytest.raises(ConfigurationError) as caught:
        configured_keys(config)
    assert f"entry 1 ({name}): the setting api_key holds the same key" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "keys = []", "keys = 1", "keys = ['a']", "[keys]\nname = 'a'"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="holds no key"):
        load_keys(write(tmp_path, text))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key key; did you mean keys\?"):
        load_keys(write(tmp_path, '[[keys]]\nname = "a"\nkey = "a"\n[[key]]\nname = "b"\nkey = "b"'))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_keys(write(tmp_path, "[[keys]]\nburst = 0\n[[keys]]\nadmin = 1"))
    assert len(caught.value.problems) == 7


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_keys(tmp_path / "none.toml")
