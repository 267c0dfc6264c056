"""The browser that the command opens: only in a terminal of a desktop, and only for a page that it can use."""

from __future__ import annotations

import io
import webbrowser
from collections.abc import Callable, Mapping

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.cli import main
from omni_ws.config import ServerConfig
from omni_ws.tools.opening import (
    on_a_desktop,
    open_page,
)

SCREEN = {"DISPLAY": ":0"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "platform", "opens"),
    [
        (SCREEN, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "linux", False),
        ({"DISPLAY": ""}, "linux", False),
        ({}, "darwin", True),
        ({}, "win32", True),
        ({**SCREEN, "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, "linux", False),
        ({"SSH_TTY": "/dev/ttys001"}, "darwin", False),
        ({**SCREEN, "CI": "true"}, "linux", False),
    ],
)
def test_a_desktop_has_a_screen_and_a_person_before_it(environ: Mapping[str, str], platform: str, opens: bool) -> None:
    assert on_a_desktop(environ, Terminal(), platform) is opens
    assert not on_a_desktop(environ, io.StringIO(), platform)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "http://127.0.0.1:9000"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:9000"),
        ({"host": "::"}, "http://[::1]:9000"),
    ],
)
def test_the_page_is_opened_on_this_machine(settings: dict[str, str], address: str) -> None:
    opened = list[str]()
    open_page(ServerConfig.model_validate(settings), 9000, opened.append).join(PATIENCE_SEC)
    assert opened == [address]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command in a terminal, whose server listens at once, and ends; returns what a browser was to open."""
    addresses = list[str]()

    async def serve(config: ServerConfig, *, listening: Callable[[int], object] | None) -> int:
        opening = None if listening is None else listening(config.port)
        if hasattr(opening, "join"):
            opening.join(PATIENCE_SEC)
        return 0

    monkeypatch.setattr("omni_ws.server.serve", serve)
    monkeypatch.setattr("omni_ws.tools.weights.fetch_for_start", lambda config: None)
    monkeypatch.setattr(
        "omni_ws.tools.opening.open_page", lambda config, port: open_page(config, port, addresses.append)
    )
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail(f"a real browser for {address}"))

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr("sys.stderr", Terminal())
        assert main(arguments, SCREEN) == 0
        return addresses

    return run


@pytest.mark.parametrize(
    ("arguments", "opens"),
    [
        ((), True),
        (("serve", "--browser"), True),
        (("serve",), False),
        (("--no-browser",), False),
        (("--api-key", "a-key-that-the-page-would-need"), False),
        (("--ssl-certfile", "certificate.pem"), False),
    ],
)
def test_a_command_opens_a_page_that_needs_nothing_else(
    arguments: tuple[str, ...], opens: bool, opened: Callable[..., list[str]]
) -> None:
    assert opened(*arguments) == (["http://127.0.0.1:8080"] if opens else [])
