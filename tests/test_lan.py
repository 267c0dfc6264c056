"""``omni-ws serve --lan``: its certificate, its key, and what it prints, against real TLS clients."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import segno
from support.live_server import live_server
from support.native_client import NativeClient
from support.patience import PATIENCE_SEC
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_ws.cli import main
from omni_ws.config import ConfigurationError, configured_keys, load
from omni_ws.tools import opening
from omni_ws.tools.lan_certificate import BACKDATED, REMAINING, VALIDITY, kept_certificate
from omni_ws.tools.opening import (
    LanServer,
    lan_address,
    lan_server,
)

NAMES = ("192.168.1.20", "localhost")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def started(folder: Path, *flags: str) -> LanServer:
    return lan_server(load(("--engine", "fake", "--port", "0", *flags)), folder)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


async def test_a_client_that_trusts_the_certificate_and_has_the_key(tmp_path: Path) -> None:
    made = started(tmp_path / "lan", "--host", "127.0.0.1")
    assert modes(tmp_path / "lan") == {"key": 0o600, "certificate_and_key.pem": 0o600}
    assert (tmp_path / "lan").stat().st_mode & 0o777 == 0o700
    assert made.config.api_key is not None
    key = {"Authorization": f"Bearer {made.config.api_key.get_secret_value()}"}
    trusting = ssl.create_default_context(cafile=str(made.config.ssl_certfile))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    settings: dict[str, Any] = {"ssl_certfile": made.config.ssl_certfile, "api_key": made.config.api_key}
    async with live_server(keys=configured_keys(made.config), still_answers=False, **settings) as server:
        for host in ("127.0.0.1", "localhost"):
            url = f"wss://{host}:{server.port}/v1/streaming_input"
            options: dict[str, Any] = {"compression": None, "proxy": None, "host": "127.0.0.1"}
            async with connect(url, ssl=trusting, additional_headers=key, **options) as connection:
                client = NativeClient(connection)
                await client.until("session_created")
                await client.say("hello network")
                assert (await client.answer()).text == "hello network"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, ssl=trusting, **options)
            assert refused.value.response.status_code == 401
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(url, ssl=ssl.create_default_context(), additional_headers=key, **options)
        with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|doesn't match"):
            await connect(url, ssl=trusting, server_hostname="elsewhere.example", **options)


def test_the_next_start_has_the_same(tmp_path: Path) -> None:
    first, second = started(tmp_path), started(tmp_path)
    assert first == second
    assert first.config.host == "0.0.0.0"
    assert first.address == lan_address()


def test_the_page_knows_its_address_for_a_phone(tmp_path: Path) -> None:
    """Not where any port is taken: it is not known yet."""
    port = ("--host", "192.0.2.7", "--port", "8443")
    assert started(tmp_path, *port).config.http.phone_url == "https://192.0.2.7:8443/"
    assert started(tmp_path, "--host", "192.0.2.7").config.http.phone_url is None


@pytest.mark.parametrize(
    ("url", "valid"),
    [
        ("https://voice.example/below/", True),
        ("voice.example", False),
        ("https://voice.example/#key=one", False),
        ("https://" + "a" * 992, True),
        ("https://" + "a" * 993, False),
    ],
)
def test_an_address_for_phones_is_checked(url: str, valid: bool) -> None:
    if valid:
        assert load(("--http.phone-url", url)).config.http.phone_url == url
    else:
        with pytest.raises(ConfigurationError, match="must be an address such as"):
            load(("--http.phone-url", url))


def test_other_addresses_need_another_certificate(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    first = kept_certificate(path, NAMES)
    assert kept_certificate(path, NAMES[:1]) == first
    assert kept_certificate(path, ("192.168.1.21", "localhost")) != first


def test_a_certificate_is_replaced_before_it_expires(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    first = kept_certificate(path, NAMES, now=NOW)
    last = NOW - BACKDATED + VALIDITY - REMAINING
    assert kept_certificate(path, NAMES, now=last - timedelta(seconds=1)) == first
    assert kept_certificate(path, NAMES, now=last) != first


def test_a_certificate_from_the_future_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    first = kept_certificate(path, NAMES, now=NOW)
    assert kept_certificate(path, NAMES, now=NOW - BACKDATED) == first
    assert kept_certificate(path, NAMES, now=NOW - BACKDATED - timedelta(seconds=1)) != first


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_broken_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    started(tmp_path)
    (tmp_path / "certificate_and_key.pem").write_bytes(content)
    assert started(tmp_path) == started(tmp_path)


def test_what_others_could_read_is_made_anew(tmp_path: Path) -> None:
    first = started(tmp_path)
    for path in tmp_path.iterdir():
        path.chmod(0o640)
    second = started(tmp_path)
    assert set(modes(tmp_path).values()) == {0o600}
    assert first.fingerprint != second.fingerprint
    assert first.config.api_key != second.config.api_key


def test_what_the_user_gives_is_used(tmp_path: Path) -> None:
    given = started(tmp_path, "--api-key", "mine", "--ssl-certfile", "cert.pem", "--host", "voice.example")
    assert (given.address, given.key_file, given.fingerprint) == ("voice.example", None, None)
    assert list(tmp_path.iterdir()) == []
    keys = started(tmp_path, "--keys-file", "keys.toml", "--host", "fd00::20")
    assert (keys.config.api_key, keys.key_file) == (None, None)
    assert keys.address == "fd00::20"
    assert [path.name for path in tmp_path.iterdir()] == ["certificate_and_key.pem"]


def test_a_machine_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses an address for all, and gives a loopback address for itself."""
    refused = (socket.AF_INET, "255.255.255.255")
    monkeypatch.setattr(opening, "ELSEWHERE", (refused, (socket.AF_INET, "127.0.0.1")))
    with pytest.raises(ConfigurationError, match="finds no network address of this machine"):
        lan_address()


def test_a_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "omni_ws").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["serve", "--engine", "fake", "--lan"], {}) == 2
    complaint = f"--lan keeps its certificate and key in {tmp_path}/omni_ws/lan: Not a directory"
    assert complaint in capsys.readouterr().err


def test_without_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(opening, "PACKAGES", ("omni_ws", "no_such_package"))
    with pytest.raises(ConfigurationError, match=r"--lan needs its packages: .*pip install omni-ws$"):
        started(tmp_path)


#: In the last line.
KEPT = b"the key is kept"


def said_on(path: Path, *, terminal: bool) -> str:
    """What ``serve --lan`` says when it is stopped as soon as it has told what to open."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_ws", "serve", "--engine", "fake", "--port", "0", "--lan", "--host", "127.0.0.1"],
        env={**os.environ, "XDG_CACHE_HOME": str(path), "PYTHONIOENCODING": "utf-8"},
        stderr=theirs,
    )
    os.close(theirs)
    said, stopped = b"", False
    try:
        while select.select([ours], [], [], 30)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # so a terminal of Linux ends
                break
            if not piece:
                break
            said += piece
            if not stopped and KEPT in said and said.endswith(b"\n"):
                stopped = True
                process.terminate()
        assert process.wait(PATIENCE_SEC) == 0
    finally:
        process.kill()
        os.close(ours)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_a_terminal_gets_a_link_with_the_key_and_its_code(tmp_path: Path) -> None:
    said = said_on(tmp_path, terminal=True)
    key = (tmp_path / "omni_ws" / "lan" / "key").read_text().strip()
    link = re.search(r"open (https://127\.0\.0\.1:\d+/#key=\S+)", said)
    assert link is not None
    assert link[1].endswith(f"#key={key}")
    rows = re.findall(re.escape(opening.QR_COLOURS) + "(.*?)" + re.escape(opening.PLAIN_COLOURS), said)
    halves = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}
    drawn = [[halves[sign][half] for sign in row] for row in rows for half in (0, 1)]
    code = [list(row) for row in segno.make_qr(link[1], error="l").matrix_iter(border=2)]
    assert drawn[: len(code)] == code
    assert len(drawn) - len(code) in (0, 1)


@pytest.mark.slow
def test_a_log_gets_no_key(tmp_path: Path) -> None:
    said = said_on(tmp_path, terminal=False)
    assert re.search(r"open https://127\.0\.0\.1:\d+/\n", said)
    assert (tmp_path / "omni_ws" / "lan" / "key").read_text().strip() not in said
    assert "█" not in said
