"""Identifiers that cannot be guessed."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """A prefix such as ``req_`` or ``sess_``, followed by 96 random bits in hexadecimal."""
    return prefix + secrets.token_hex(12)
