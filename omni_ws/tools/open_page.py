"""Opening the server's page in the browser of whoever started it in a terminal of a desktop."""

from __future__ import annotations

import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from typing import Final, TextIO

from omni_ws.config import ServerConfig
from omni_ws.config.startup import page_address

#: Variables of an environment in which nobody sits before the screen.
_ELSEWHERE: Final = ("CI", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_SCREENS: Final = ("DISPLAY", "WAYLAND_DISPLAY")


def on_a_desktop(environ: Mapping[str, str], out: TextIO, platform: str = sys.platform) -> bool:
    """Whether a person reads ``out`` in a terminal of a desktop, where a browser can open."""
    if not out.isatty() or any(environ.get(name) for name in _ELSEWHERE):
        return False
    return platform in ("darwin", "win32") or any(environ.get(name) for name in _SCREENS)


def opens_by_itself(config: ServerConfig) -> bool:
    """Whether a browser on this machine can use the page as it opens, without a key and a certificate to accept."""
    return config.api_key is None and config.auth.keys_file is None and config.ssl_certfile is None


def open_page(
    config: ServerConfig, port: int, open_address: Callable[[str], object] = webbrowser.open
) -> threading.Thread:
    """Open the page in a thread, which is returned: some browsers return when they are closed."""
    opening = threading.Thread(target=open_address, args=(page_address(config, port),), name="browser", daemon=True)
    opening.start()
    return opening
