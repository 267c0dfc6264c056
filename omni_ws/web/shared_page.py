"""The page of a shared conversation: one file, with its sheets and its script within it and a policy for just these.

The browser that shares a conversation puts the conversation into it (``examples/browser/calls/shared-file.js``).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Final

from omni_ws.web.one_file import one_file

_PAGE: Final = "shared.html"
_SCRIPT: Final = "browser/calls/shared.js"
_SHEETS: Final = ("style.css", "calls/waterfall.css", "calls/calls.css", "calls/shared.css")
_DARK: Final = "dark.css"
#: The only network that remains is none. The sound is a data: address within the page.
_POLICY: Final = (
    "default-src 'none'; script-src {script}; style-src {style}; media-src data:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'"
)


def shared_page(read: Callable[[str], str]) -> str:
    """Return the page, without a conversation. ``read`` returns the text of a file by its path on the server."""
    sheets = [read(f"browser/{name}") for name in _SHEETS]
    dark = read(f"browser/{_DARK}")
    style = "\n".join([*sheets, f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n"])
    script = one_file(read, _SCRIPT)
    for name, text in (("script", script), ("style", style)):
        if f"</{name}" in text.lower():
            raise ValueError(f"the {name} of a shared conversation has its own end tag within it")
    policy = _POLICY.format(script=_source(script), style=_source(style))
    places = {
        "<!--POLICY-->": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "<!--STYLE-->": f"<style>{style}</style>",
        "<!--SCRIPT-->": f'<script type="module">{script}</script>',
    }
    page = resources.files(__package__).joinpath(_PAGE).read_text(encoding="utf-8")
    for place, content in places.items():
        page = page.replace(place, content, 1)
    return page


def _source(text: str) -> str:
    """Return the source expression of an inline script or sheet (CSP 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
