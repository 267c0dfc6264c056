"""The files that the server gives to browsers, and their combination into single files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Final


def folders() -> tuple[Traversable, Traversable]:
    """Return the folders of the pages and of the client library, in the installed package or in the repository."""
    packaged = resources.files(__name__)
    if packaged.joinpath("browser").is_dir():
        return packaged.joinpath("browser"), packaged
    repository = Path(__file__).parents[2]
    return repository / "examples" / "browser", repository / "clients" / "js"


# One file of a module for browsers and of all that it imports.
#
# Each module becomes a function that returns its exports, in an order in which a module stands behind those that it
# imports. Only the forms that our modules have are understood; anything else is an error, which a test finds.


_IMPORT: Final = re.compile(r'^import \{ (\w+(?:, \w+)*) \} from "(\.[^"]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:class|function|const) (\w+))", re.MULTILINE)
_EXPORT_LIST: Final = re.compile(r"^export \{ (\w+(?:, \w+)*) \};$", re.MULTILINE)
#: What this module does not understand.
_FOREIGN: Final = re.compile(r"^(?:import|export)\b.*|\bimport\(.*", re.MULTILINE)
#: Comments on lines of their own. Other comments stay: they could be a part of a string.
_COMMENT: Final = re.compile(r"^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/|//.*)[ \t]*\n", re.MULTILINE)
_INDENT: Final = re.compile(r"^[ \t]+|\n(?=\n)", re.MULTILINE)
_OWN_ADDRESS: Final = re.compile(r'new URL\("\./([\w.-]+)", import\.meta\.url\)')


def one_file(read: Callable[[str], str], entry: str) -> str:
    """Return the JavaScript module ``entry`` and all modules that it imports, combined in one module.

    ``read`` returns the text of a module by its path. Relative addresses of other files still hold.
    """
    modules: dict[str, str] = {}
    _add(read, entry, modules, [])
    return "".join([f"// {entry} of omni-ws, Apache-2.0\n", *modules.values()])


def _add(read: Callable[[str], str], path: str, modules: dict[str, str], importers: list[str]) -> None:
    """Add the module at ``path``, after the modules that it imports. Raises ValueError for unsupported syntax."""
    if path in importers:
        raise ValueError(f"{path} imports itself, by {' and '.join(importers)}")
    text = _COMMENT.sub("", read(path))
    for imported in _IMPORT.finditer(text):
        found = normpath(join(dirname(path), imported[2]))
        if found not in modules:
            _add(read, found, modules, [*importers, path])
    body = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = {_name(path, found[2])};", text)
    body = _OWN_ADDRESS.sub(lambda found: f'new URL("./{join(dirname(path), found[1])}", import.meta.url)', body)
    body = _INDENT.sub("", body)
    if importers:
        exports = _EXPORT.findall(body)
        exports += [name for names in _EXPORT_LIST.findall(body) for name in names.split(", ")]
        body = _EXPORT_LIST.sub("", _EXPORT.sub("", body)).strip()
        body = f"const {_name('', path)} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
    modules[path] = body
    if foreign := _FOREIGN.search(_EXPORT_LIST.sub("", _EXPORT.sub("", body))):
        raise ValueError(f"{path} has what cannot be made a part of one file: {foreign[0]}")


def _name(importer: str, path: str) -> str:
    return "$" + re.sub(r"\W", "_", normpath(join(dirname(importer), path)))


_PAGE: Final = "shared.html"
_SCRIPT: Final = "browser/calls/shared.js"
_SHEETS: Final = ("style.css", "calls/waterfall.css", "calls/calls.css", "calls/shared.css")
_DARK: Final = "dark.css"
#: The policy allows no network. The audio is a data: address within the page.
_POLICY: Final = (
    "default-src 'none'; script-src {script}; style-src {style}; media-src data:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'"
)


def shared_page(read: Callable[[str], str]) -> str:
    """Return the page for a shared conversation: one HTML file, whose policy allows only its own styles and script.

    The browser that shares a conversation inserts the conversation (``examples/browser/calls/shared-file.js``).
    ``read`` returns the text of a file by its path on the server.
    """
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
    """Return the CSP source expression of an inline script or style (CSP 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
