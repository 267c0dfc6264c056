"""Ways to open the server: its page in the browser of the person who started it, and ``omni-ws serve --lan``.

With ``--lan``, phones and other machines of the local network can use the server, with TLS and a key.
"""

from __future__ import annotations

import io
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TextIO
from urllib.parse import quote

from pydantic import SecretStr

from omni_ws.config import ConfigurationError, LoadedConfig, ServerConfig
from omni_ws.config.loading import page_address
from omni_ws.config.values import literal_address, replace_file, user_cache_folder
from omni_ws.installing import install_command

#: Environment variables that show that nobody sits in front of the screen.
_ELSEWHERE: Final = ("CI", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_SCREENS: Final = ("DISPLAY", "WAYLAND_DISPLAY")


def on_a_desktop(environ: Mapping[str, str], out: TextIO, platform: str = sys.platform) -> bool:
    """Return whether ``out`` is a terminal on a desktop, where a browser can open."""
    if not out.isatty() or any(environ.get(name) for name in _ELSEWHERE):
        return False
    return platform in ("darwin", "win32") or any(environ.get(name) for name in _SCREENS)


def opens_by_itself(config: ServerConfig) -> bool:
    """Return whether a browser on this machine can use the page immediately: no key, no certificate to accept."""
    return config.api_key is None and config.auth.keys_file is None and config.ssl_certfile is None


def open_page(
    config: ServerConfig, port: int, open_address: Callable[[str], object] = webbrowser.open
) -> threading.Thread:
    """Open the page in a browser, in a thread, which is returned: some browsers return only when they are closed."""
    opening = threading.Thread(target=open_address, args=(page_address(config, port),), name="browser", daemon=True)
    opening.start()
    return opening


# ``omni-ws serve --lan``: the server for phones and other machines of the local network, with TLS and a key.


PACKAGES: Final = ("cryptography", "segno")
#: Addresses for documentation (RFC 5737, RFC 3849): the system says from which address it would send to them.
ELSEWHERE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
#: The names by which a browser on this machine opens the page.
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
KEY_BYTES: Final = 16
#: Black on white, whatever the colours of the terminal: cameras read no inverted codes.
QR_COLOURS: Final = "\x1b[38;5;16;48;5;231m"
PLAIN_COLOURS: Final = "\x1b[0m"


def lan_server(loaded: LoadedConfig, folder: Path | None = None) -> LanServer:
    """Complete a configuration for the local network with an address, a certificate and a key, where it lacks them.

    Certificate and key are kept in ``folder``, by default in the user's cache, and used again at the next start. Raises
    ConfigurationError.
    """
    config = loaded.config
    folder = folder or user_cache_folder() / "lan"
    if any(find_spec(name) is None for name in PACKAGES):
        raise ConfigurationError([f"--lan needs its packages: {install_command()}"])
    host = "0.0.0.0" if loaded.origin("host") == "default" else config.host
    literal = literal_address(host)
    address = lan_address() if literal is not None and literal.is_unspecified else host
    if ":" in address and host == "0.0.0.0":
        host = "::"
    changes: dict[str, object] = {"host": host}
    key_file = fingerprint = None
    try:
        if config.api_key is None and config.auth.keys_file is None:
            key_file = folder / "key"
            changes["api_key"] = SecretStr(_kept_key(key_file))
        if config.ssl_certfile is None:
            from omni_ws.tools.lan_certificate import kept_certificate

            changes["ssl_certfile"] = folder / "certificate_and_key.pem"
            fingerprint = kept_certificate(folder / "certificate_and_key.pem", (address, *LOOPBACK_NAMES))
    except OSError as error:
        raise ConfigurationError(
            [f"--lan keeps its certificate and key in {folder}: {error.strerror}; XDG_CACHE_HOME names another place"]
        ) from None
    if config.port and config.http.phone_url is None:
        changes["http"] = config.http.model_copy(update={"phone_url": _page_url(address, config.port)})
    return LanServer(config.model_copy(update=changes), address, key_file, fingerprint)


def lan_address() -> str:
    """Return the address of this machine in its network, without sending anything. Raises ConfigurationError."""
    for family, elsewhere in ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                address: str = probe.getsockname()[0]
        except OSError:  # no route, or no addresses of this family
            continue
        parsed = literal_address(address)
        if parsed is not None and not parsed.is_loopback:
            return address
    raise ConfigurationError(
        ["--lan finds no network address of this machine; connect it to a network, or name the address with --host"]
    )


@dataclass(frozen=True, slots=True)
class LanServer:
    """A server for the local network: its configuration, and what a person must know to open its page."""

    config: ServerConfig
    #: The address or name by which other machines reach the server.
    address: str
    #: The file with the key, if the key was generated here.
    key_file: Path | None
    #: The SHA-256 fingerprint of the certificate, if it was generated here.
    fingerprint: str | None

    def tell(self, port: int, out: TextIO) -> None:
        """Print how to open the page. The key and a QR code go only to terminals: other output may be a log."""
        print("\n".join(self._lines(port, out)), file=out, flush=True)

    def _lines(self, port: int, out: TextIO) -> Iterator[str]:
        url = _page_url(self.address, port)
        if out.isatty() and self.config.api_key is not None:
            url += f"#key={quote(self.config.api_key.get_secret_value(), safe='')}"
        yield f"on a phone or another machine of this network, open {url}"
        if out.isatty():
            yield from _qr_code(url, out.encoding)
        if self.fingerprint is not None:
            yield f"its browser warns of the certificate, which is this machine's own (SHA-256 {self.fingerprint})"
        if self.key_file is not None:
            yield f"the key is kept in {self.key_file}"


def _page_url(address: str, port: int) -> str:
    return f"https://{f'[{address}]' if ':' in address else address}:{port}/"


def _qr_code(url: str, encoding: str) -> Iterator[str]:
    """Yield the lines of a QR code; none if the terminal's encoding lacks the characters."""
    import segno

    drawn = io.StringIO()
    segno.make_qr(url, error="l").terminal(drawn, border=2, compact=True)
    try:
        drawn.getvalue().encode(encoding)
    except UnicodeEncodeError:
        return
    # Drawn for light characters on a dark background.
    swapped = drawn.getvalue().translate(str.maketrans("█▀▄ ", " ▄▀█"))
    for line in swapped.splitlines():
        yield f"{QR_COLOURS}{line}{PLAIN_COLOURS}"


def _kept_key(path: Path) -> str:
    """Return the key in a file; first write a new key to it if it is missing, empty or readable to other users.

    Raises OSError.
    """
    content = read_private(path)
    key = "" if content is None else content.decode("ascii", "ignore").strip()
    if not key:
        key = secrets.token_urlsafe(KEY_BYTES)
        write_private(path, f"{key}\n".encode())
    return key


# Small files that only their owner may read


def read_private(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing, or if other users can read it and so know the secret.

    Raises OSError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            shared = os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077
            return None if shared else file.read()
    except FileNotFoundError:
        return None


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically, readable only by its owner; create its folder if necessary. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, content)
