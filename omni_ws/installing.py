"""The commands that messages name: they work as they stand, in the environment of the server that prints them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def this_python() -> str:
    """The running interpreter, as a shell in this folder can call it."""
    executable = Path(sys.executable)
    try:
        return shlex.quote(str(executable.relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shlex.quote(os.fspath(executable))


def install_command(extra: str) -> str:
    """What installs the packages of one extra beside omni_ws, which is there already and is not downloaded."""
    return f"{this_python()} -m pip install 'omni_ws[{extra}]'"


def wrong_python(missing: ModuleNotFoundError, arguments: str) -> str:
    """What to say where ``missing`` is not installed in the running interpreter."""
    return (
        f"the Python that runs this ({sys.executable}) has no package {missing.name}; "
        f"use the project's own, which 'make venv' makes: .venv/bin/python {arguments}"
    )


#: vLLM has an environment of its own.
INSTALL_VLLM = "'make serve ENGINE=vllm MODEL=…' in the project's folder installs it"
