"""Gathers what the site of the documents is built of: `site_sources.py FOLDER`.

The documents keep their places, so that links between them, and to files of the repository, lead where they lead
there; only the front page and the README move (`MOVED`). `docs/README.md` is the table of contents. `reference/` has a
page for each package of `REFERENCE`, from the docstrings.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Packages and modules for programs that use this one: as a client, in one process with it, or with their own engine.
REFERENCE = (
    "omni_ws",
    "omni_ws.server",
    "omni_ws.client",
    "omni_ws.config.model",
    "omni_ws.config.keys",
    "omni_ws.engine.base",
    "omni_ws.engine.fake",
    "omni_ws.errors",
    "omni_ws.metrics",
    "omni_ws.wire.frames",
    "omni_ws.wire.server_frames",
    "omni_ws.wire.recording",
)
FRONT = Path("docs/site/front.md")
INDEX = Path("docs/README.md")
STYLE = Path("docs/site/front.css")
SCRIPT = Path("docs/site/site.js")
#: A folder's README.md would be its index.html.
MOVED = {FRONT: Path("index.md"), Path("README.md"): Path("overview.md")}
_LINK = re.compile(r'\]\((?!\w+:|#)([^)\s#]+)|<img [^>]*src="(?!\w+:)([^"]+)')
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`(?!\])", re.DOTALL | re.MULTILINE)


def documents() -> list[Path]:
    """The documents, by their places in the repository."""
    patterns = (
        "*.md",
        "docs/**/*.md",
        "protocol/**/*.md",
        "*/*.md",
        "clients/js/*.md",
        "tests/data/*.md",
        "examples/*/*.md",
    )
    found = {path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not path.parts[0].startswith("."))


def linked(document: Path) -> list[Path]:
    """The files and folders of the repository to which a document links."""
    text = _CODE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    targets = [target or image for target, image in _LINK.findall(text)]
    return [Path(os.path.normpath(document.parent / target)) for target in targets]


def as_page(page: Path) -> str:
    """The text of a document, with links that lead where they led.

    A site has no pages for folders, so the words of such links stay alone.
    """
    place = MOVED.get(page, page)

    def replaced(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        goal = Path(os.path.normpath(page.parent / target))
        if (ROOT / goal).is_dir():
            return found[1]
        led = os.path.relpath(MOVED.get(goal, goal), place.parent)
        return f"[{found[1]}]({led}{'#' if anchor else ''}{anchor})"

    text = (ROOT / page).read_text(encoding="utf-8")
    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.DOTALL | re.MULTILINE)
    link = r"\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)"
    return "".join(part if part.lstrip().startswith("```") else re.sub(link, replaced, part) for part in parts)


def contents() -> dict[str, list[str]]:
    """The parts of the table of contents, each with its documents in order."""
    parts: dict[str, list[str]] = {}
    for heading, text in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / INDEX).read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        links = re.findall(r"\]\(([^)#\s]+\.md)\)", text)
        parts[heading] = [os.path.normpath(INDEX.parent / link) for link in links]
    return parts


def navigation(pages: list[Path]) -> list[object]:
    """The table of contents, with every document in one of its parts."""
    parts: dict[str, list[object]] = {name: [*links] for name, links in contents().items()}
    named = {str(INDEX), str(FRONT), *(link for links in contents().values() for link in links)}
    left = [str(page) for page in pages if str(page) not in named]
    guides = [page for page in left if page.startswith("docs/guides/")]
    decisions = [page for page in left if page.startswith("docs/decisions/")]
    others = [page for page in left if page not in guides and page not in decisions]
    for links in parts.values():
        if "docs/guides/README.md" in links:
            place = links.index("docs/guides/README.md")
            links[place : place + 1] = [{"Where people already are": ["docs/guides/README.md", *guides]}]
    parts["Reference"].append({"Python": [f"reference/{name}.md" for name in ("index", *REFERENCE)]})
    parts["Explanation"].append({"Decisions": decisions})
    parts["The project"] = [str(MOVED.get(Path(page), page)) for page in others]
    return [{"Home": "index.md"}, *({name: links} for name, links in parts.items()), {"All documents": str(INDEX)}]


def write_reference(folder: Path) -> None:
    folder.mkdir()
    list_of_all = "".join(f"- [`{name}`]({name}.md)\n" for name in REFERENCE)
    (folder / "index.md").write_text(f"# Python reference\n\n{list_of_all}", encoding="utf-8")
    for name in REFERENCE:
        (folder / f"{name}.md").write_text(f"# {name}\n\n::: {name}\n", encoding="utf-8")


def configuration(pages: list[Path]) -> dict[str, object]:
    """The configuration of MkDocs. JSON is YAML."""
    options = {
        "show_root_heading": False,
        "show_root_toc_entry": False,
        "show_source": False,
        "members_order": "source",
        "show_if_no_docstring": True,
        "docstring_style": None,
        "separate_signature": True,
        "show_signature_annotations": True,
        "heading_level": 2,
    }
    warn = {"not_found": "warn", "absolute_links": "warn", "unrecognized_links": "warn", "anchors": "warn"}
    return {
        "site_name": "omni_ws",
        "docs_dir": "pages",
        "theme": {
            "name": "material",
            "font": False,
            "features": ["navigation.indexes", "navigation.top", "navigation.tabs", "content.code.copy"],
            "palette": [
                {
                    "media": "(prefers-color-scheme: light)",
                    "scheme": "default",
                    "primary": "teal",
                    "accent": "deep orange",
                },
                {
                    "media": "(prefers-color-scheme: dark)",
                    "scheme": "slate",
                    "primary": "teal",
                    "accent": "deep orange",
                },
            ],
        },
        "extra_css": [str(STYLE)],
        "extra_javascript": [str(SCRIPT)],
        "use_directory_urls": False,
        "nav": navigation(pages),
        "validation": {"links": warn, "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"}},
        # Headings have the names that GitHub gives them, which the links use.
        "markdown_extensions": [
            *("admonition", "attr_list", "md_in_html", "meta", "tables", "pymdownx.highlight", "pymdownx.superfences"),
            {"toc": {"slugify": "!slugify"}},
        ],
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": options}}}},
        ],
    }


def main(folder: str) -> int:
    target = Path(folder)
    shutil.rmtree(target, ignore_errors=True)
    pages = documents()
    target.mkdir(parents=True)
    missing = []
    for page in pages:
        for source in (page, *linked(page)):
            place = target / "pages" / MOVED.get(source, source)
            if source.parts[0] == ".." or not (ROOT / source).exists():
                missing.append(f"{page}: there is no {source}")
            elif (ROOT / source).is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                if source.suffix == ".md":
                    place.write_text(as_page(source), encoding="utf-8")
                else:
                    shutil.copyfile(ROOT / source, place)
    for line in missing:
        print(line, file=sys.stderr)
    for asset in (STYLE, SCRIPT):
        (target / "pages" / asset).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / asset, target / "pages" / asset)
    write_reference(target / "pages" / "reference")
    text = json.dumps(configuration(pages), indent=1)
    slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower-ascii}}"
    (target / "mkdocs.yml").write_text(text.replace('"!slugify"', slugify), encoding="utf-8")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
