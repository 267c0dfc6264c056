"""Types of options of the commands that call a server."""

from __future__ import annotations

import argparse
import math
import ssl


def count(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return number


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


def certificates(path: str) -> ssl.SSLContext:
    """Read the certificates to trust for wss."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # includes SSLError, for a file without certificates
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror or error}") from None
