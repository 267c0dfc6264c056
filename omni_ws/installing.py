"""Commands to install and fetch things, as messages show them to users; and a check of private names in packages."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.metadata import version
from pathlib import Path


def this_python() -> str:
    """Return the running interpreter, quoted for a shell in the current folder."""
    executable = Path(sys.executable)
    try:
        return shlex.quote(str(executable.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shlex.quote(os.fspath(executable))


class Installer(Enum):
    """The program that made the environment of the running interpreter; packages are added by the same program."""

    PIP = "pip"
    #: An environment that `uvx` made in its cache, to which nothing is added.
    UVX = "uvx"
    UV_TOOL = "uv tool"
    #: An environment of `uv venv` or a project of uv, which may be without pip.
    UV_VENV = "uv venv"
    PIPX = "pipx"
    PIPX_RUN = "pipx run"


def installer(prefix: Path | None = None) -> Installer:
    """Return the program that made the environment at ``prefix``, by default that of the running interpreter."""
    prefix = prefix or Path(sys.prefix)
    if (prefix / "uv-receipt.toml").is_file():
        return Installer.UV_TOOL
    if re.fullmatch(r"(archive|environments)-v\d+", prefix.parent.name):
        return Installer.UVX
    if prefix.parent.name == "pipx" or prefix.parts[-3:-1] in (("pipx", ".cache"), ("pipx", "Cache")):
        return Installer.PIPX_RUN
    if (prefix / "pipx_metadata.json").is_file():
        return Installer.PIPX
    return Installer.UV_VENV if _names_uv(prefix / "pyvenv.cfg") else Installer.PIP


def _names_uv(settings: Path) -> bool:
    """Return whether uv wrote ``settings``, the file pyvenv.cfg of an environment."""
    try:
        return re.search(r"(?m)^uv\s*=", settings.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


def install_command(extra: str = "", made_by: Installer | None = None) -> str:
    """Return the command that installs omni-ws and its required packages, and those of ``extra`` if it is given.

    For `uvx` and `pipx run`, return the command that starts the server with these packages.
    """
    wanted = f"'omni-ws[{extra}]'" if extra else "omni-ws"
    match made_by or installer():
        case Installer.UVX:
            return f"uvx --with {wanted} omni-ws"
        case Installer.UV_TOOL:
            return f"uv tool install --with {wanted} omni-ws"
        case Installer.UV_VENV:
            return f"uv pip install --python {this_python()} {wanted}"
        case Installer.PIPX:
            return f"pipx install --force {wanted}"
        case Installer.PIPX_RUN:
            return f"pipx run --spec {wanted} omni-ws"
        case Installer.PIP:
            return f"{this_python()} -m pip install {wanted}"


def fetch_command(weights: str, made_by: Installer | None = None) -> str:
    """Return the command that fetches a model's weights; ``weights`` is a name in ``requirements/weights.lock``."""
    match made_by or installer():
        case Installer.UVX:
            command = "uvx omni-ws"
        case Installer.PIPX_RUN:
            command = "pipx run omni-ws"
        case _:
            command = f"{this_python()} -m omni_ws"
    return f"{command} weights fetch {weights}"


def wrong_python(missing: ModuleNotFoundError, arguments: str) -> str:
    """Return the message about a package that the running interpreter lacks."""
    return (
        f"this Python ({sys.executable}) lacks the package {missing.name}; "
        f"use the project's own, which 'make venv' creates: .venv/bin/python {arguments}"
    )


#: vLLM is installed into a separate environment.
INSTALL_VLLM = "'make serve ENGINE=vllm MODEL=…' in the project's folder installs it"


def check_private_names(package: str, used: Mapping[type, Sequence[str]]) -> None:
    """Raise ImportError if classes of ``package`` lack private names that this package uses.

    ``used`` maps each class to these names. A class has a name if it defines it, or if its constructor sets it.
    """
    gone = [
        f"{kind.__name__}.{name}"
        for kind, names in used.items()
        for name in names
        if not hasattr(kind, name) and name not in kind.__dict__["__init__"].__code__.co_names
    ]
    if gone:
        raise ImportError(
            f"{package} {version(package)} has no {', '.join(gone)}, which omni_ws relies on: "
            f"install a version that pyproject.toml allows"
        )
