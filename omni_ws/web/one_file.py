"""One file of a module for browsers and of all that it imports.

Each module becomes a function that returns its exports, in an order in which a module stands behind those that it
imports. Only the forms that our modules have are understood; anything else is an error, which a test finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from posixpath import dirname, join, normpath
from typing import Final

_IMPORT: Final = re.compile(r'^import \{ (\w+(?:, \w+)*) \} from "(\.[^"]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async )?(?:class|function|const) (\w+))", re.MULTILINE)
_EXPORT_LIST: Final = re.compile(r"^export \{ (\w+(?:, \w+)*) \};$", re.MULTILINE)
#: What this module does not understand.
_FOREIGN: Final = re.compile(r"^(?:import|export)\b.*|\bimport\(.*", re.MULTILINE)
#: Comments that have their lines for themselves. Others stay: what looks like one can be a part of a text.
_COMMENT: Final = re.compile(r"^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/|//.*)[ \t]*\n", re.MULTILINE)
_INDENT: Final = re.compile(r"^[ \t]+|\n(?=\n)", re.MULTILINE)
_OWN_ADDRESS: Final = re.compile(r'new URL\("\./([\w.-]+)", import\.meta\.url\)')


def one_file(read: Callable[[str], str], entry: str) -> str:
    """Return the module ``entry`` with all that it imports. Addresses of files beside a module hold.

    ``read`` returns the text of a module by its path.
    """
    modules: dict[str, str] = {}
    _add(read, entry, modules, [])
    return "".join([f"// {entry} of omni-ws, Apache-2.0\n", *modules.values()])


def _add(read: Callable[[str], str], path: str, modules: dict[str, str], importers: list[str]) -> None:
    """Add the module at ``path`` behind those that it imports. Raises ValueError for forms that are not understood."""
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
