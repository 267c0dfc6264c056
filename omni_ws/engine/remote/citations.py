"""Reads the web pages that an upstream's answer names, in OpenAI's ``annotations``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from omni_ws.core.chunks import UrlCitation

#: More pages than any answer names, and the longest addresses and titles, in characters.
MOST_CITATIONS: Final = 32
_LONGEST_URL: Final = 2048
_LONGEST_TITLE: Final = 256
_LONGEST_LICENSE: Final = 64


def citations_of(fields: object, choice: int) -> Iterator[UrlCitation]:
    """Yield the web pages in the ``annotations`` of a delta or a message; those of other kinds are left out."""
    annotations = fields.get("annotations") if isinstance(fields, dict) else None
    for one in annotations if isinstance(annotations, list) else ():
        match one:
            case {"type": "url_citation", "url_citation": {"url": str(url), **more}} if len(url) <= _LONGEST_URL:
                if not url.startswith(("https://", "http://")):
                    continue
                title, license = more.get("title"), more.get("license")
                start, end = (
                    value if type(value := more.get(name)) is int and value >= 0 else 0
                    for name in ("start_index", "end_index")
                )
                yield UrlCitation(
                    title=title[:_LONGEST_TITLE] if isinstance(title, str) and title else url,
                    url=url,
                    start=start,
                    end=max(start, end),
                    license=license[:_LONGEST_LICENSE] if isinstance(license, str) and license else None,
                    choice=choice,
                )
