"""Puts every page of the site as plain Markdown beside its HTML: `site_markdown.py SOURCES SITE`.

`llms.txt` lists the pages (https://llmstxt.org), and `llms-full.txt` contains their text. Runs in the
environment of `make docs`, whose griffe reads the docstrings of the reference.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from site_sources import INDEX, MOVED, REFERENCE, ROOT

SUMMARY = Path("README.md")


def reference(name: str) -> str:
    """The public names of a module, with signatures and docstrings."""
    module = griffe.load(name, search_paths=[ROOT])
    return "\n\n".join([f"# {name}", *_described(module, level=2)]) + "\n"


def _described(thing: griffe.Object | griffe.Alias, level: int) -> Iterator[str]:
    if thing.docstring:
        yield thing.docstring.value
    if not thing.is_module and not thing.is_class:
        return
    for name, member in thing.members.items():
        imported = thing.is_module and thing.exports is None and member.is_alias
        if name.startswith("_") or imported or (thing.exports is not None and name not in thing.exports):
            continue
        yield f"{'#' * level} `{member.signature() if member.is_function else name}`"
        yield from _described(member, level + 1)


def list_of_pages() -> str:
    """The text of `llms.txt`: what the project is, then the table of contents."""
    title, _, rest = (ROOT / SUMMARY).read_text(encoding="utf-8").partition("\n\n")
    what = " ".join(rest.partition("\n\n")[0].split())
    index = (ROOT / INDEX).read_text(encoding="utf-8").partition("\n\n")[2]

    def from_the_top(link: re.Match[str]) -> str:
        goal = Path(os.path.normpath(INDEX.parent / link[1]))
        return f"]({MOVED.get(goal, goal)})"

    listed = re.sub(r"\]\((?!\w+:)([^)\s]+)\)", from_the_top, index)
    modules = "".join(f"- [`{name}`](reference/{name}.md)\n" for name in REFERENCE)
    return f"{title}\n\n> {what}\n\n{listed}\n## Python\n\n{modules}"


def main(sources: Path, site: Path) -> None:
    pages = sources / "pages"
    for page in pages.glob("**/*.md"):
        place = page.relative_to(pages)
        named = place.stem if place.parts[0] == "reference" else ""
        text = reference(named) if named in REFERENCE else page.read_text(encoding="utf-8")
        # README.md is shown as the index of its folder.
        html = place.with_name("index.html") if place.name == "README.md" else place.with_suffix(".html")
        if not (site / html).exists():
            raise SystemExit(f"{place} has no page {html}")
        (site / place).write_text(text, encoding="utf-8")
        (site / html).with_suffix(".md").write_text(text, encoding="utf-8")
    listed = list_of_pages()
    (site / "llms.txt").write_text(listed, encoding="utf-8")
    found = re.findall(r"\]\(([^)#\s]+\.md)\)", listed)
    missing = [place for place in found if not (site / place).exists()]
    if missing:
        raise SystemExit(f"llms.txt lists pages that are not there: {missing}")
    texts = [f"<!-- {place} -->\n\n{(site / place).read_text(encoding='utf-8')}" for place in dict.fromkeys(found)]
    (site / "llms-full.txt").write_text("\n\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
