"""Makes the relative links of a README absolute, for a package index: `absolute_links.py README.md OWNER/NAME REF`.

The repository's address is that of the build, so none is written into the project.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(r'(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)|(<img [^>]*src=")(?![a-z]+:)([^"]+)')


def absolute(text: str, repository: str, ref: str) -> str:
    """The text with pictures from GitHub's raw files, and links to its pages. Blocks of code stay as they are."""

    def replaced(found: re.Match[str]) -> str:
        picture, words, target, image, source = found.groups()
        if image:
            return f"{image}https://raw.githubusercontent.com/{repository}/{ref}/{source}"
        place = f"raw.githubusercontent.com/{repository}/{ref}" if picture else f"github.com/{repository}/blob/{ref}"
        return f"{picture}{words}(https://{place}/{target})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(absolute(file.read_text(encoding="utf-8"), *sys.argv[2:4]), encoding="utf-8")
