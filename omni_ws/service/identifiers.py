"""Identifiers that nobody can guess."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """``req_…``, ``sess_…``, ``chatcmpl-…``: the prefix, then 96 random bits."""
    return prefix + secrets.token_hex(12)
