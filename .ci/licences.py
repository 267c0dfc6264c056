"""Gathers the licences of what an image holds: `PYTHON .ci/licences.py FOLDER`, with the PYTHON that will serve.

Writes `packages.txt`, with the licence of each package and where its text is, and `weights.txt`, with the licences of
the weights that were fetched and their texts; copies LICENSE, NOTICE and the addresses of sources. A package without a
text has to be in `_TEXTS`.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from omni_ws.weights import pinned_weights, weights_cache

ROOT: Final = Path(__file__).parents[1]
LICENCES: Final = ROOT / "deploy" / "licences"
#: Packages that bring no text: their licence, and where its text is.
_TEXTS: Final = {
    "ctranslate2": ("MIT, (c) 2018 SYSTRAN, 2019- the OpenNMT authors", "MIT.txt"),
    "espeakng-loader": ("GPL-3.0-or-later (espeak-ng)", "/usr/share/common-licenses/GPL-3; see SOURCES"),
    "flatbuffers": ("Apache-2.0, (c) Google Inc.", "LICENSE"),
}
#: The texts of the licences of weights. CC BY-SA may be named by its address.
_OF_WEIGHTS: Final = {
    "MIT": "MIT.txt",
    "BSD-2-Clause": "BSD-2-Clause.txt",
    "Apache-2.0": "LICENSE",
    "CC BY-SA 4.0": "https://creativecommons.org/licenses/by-sa/4.0/legalcode",
}


def of_package(package: Distribution) -> str:
    """Return the line of a package. Raises KeyError for one whose text is nowhere."""
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    texts = [file for file in package.files or () if re.match(r"(?i)(licen[cs]e|copying|notice)", file.name)]
    if not texts:
        licence, place = _TEXTS[name]
        return f"{name} {package.version}: {licence}: {place}"
    fields = package.metadata.get("License-Expression"), package.metadata.get("License")
    licence = next((field.splitlines()[0] for field in fields if field), "see the text")
    return f"{name} {package.version}: {licence}: {', '.join(str(package.locate_file(file)) for file in texts)}"


def main(folder: str) -> int:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "LICENSE", ROOT / "NOTICE", *LICENCES.iterdir()):
        shutil.copy(file, target)
    lines = sorted(of_package(package) for package in distributions())
    (target / "packages.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    cache = weights_cache()
    fetched = [weights for weights in pinned_weights().values() if cache.find(weights) is not None]
    about = [f"{one.name}: {one.licence}, {one.attribution}: {_OF_WEIGHTS[one.licence]}" for one in fetched]
    (target / "weights.txt").write_text("\n".join(about) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
