"""Commands that messages suggest, valid in the running server's environment; and a check of packages' private names."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path


def this_python() -> str:
    """Return the running interpreter, quoted for a shell in the current folder."""
    executable = Path(sys.executable)
    try:
        return shlex.quote(str(executable.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shlex.quote(os.fspath(executable))


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra beside omni_ws."""
    return f"{this_python()} -m pip install 'omni_ws[{extra}]'"


def fetch_command(weights: str) -> str:
    """Return the command that fetches weights of a model, by their name in ``requirements/weights.lock``."""
    return f"{this_python()} -m omni_ws weights fetch {weights}"


def wrong_python(missing: ModuleNotFoundError, arguments: str) -> str:
    """Return the message about a package that the running interpreter lacks."""
    return (
        f"this Python ({sys.executable}) lacks the package {missing.name}; "
        f"use the project's own, which 'make venv' creates: .venv/bin/python {arguments}"
    )


#: vLLM is installed into a separate environment.
INSTALL_VLLM = "'make serve ENGINE=vllm MODEL=…' in the project's folder installs it"


def check_private_names(package: str, used: Mapping[type, Sequence[str]]) -> None:
    """Raise ImportError if classes of ``package`` lack private names that are used here.

    The names of a class are those that it defines, and those that its constructor sets.
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
