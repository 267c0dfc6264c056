"""Makes a wheel smaller without taking anything out that runs: `PYTHON .ci/slim_wheel.py WHEEL`, with zopflipy.

What browsers are sent loses its lines of comments and its indentation of JSON, and all files are deflated by Zopfli,
which takes longer and finds more than zlib. The same wheel gives the same bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Final

_OF_PAGES: Final = re.compile(r"omni_ws/web/.+\.(?:js|css)")
#: Comments that have their lines for themselves, which omni_ws/web/__init__.py leaves out, too (test_slim_wheel.py).
_COMMENT: Final = re.compile(r"^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/|//.*)[ \t]*\n", re.MULTILINE)


def slim(name: str, data: bytes) -> bytes:
    """Return what stands for a file of the wheel."""
    if name.endswith("/openapi.json"):
        return json.dumps(json.loads(data), ensure_ascii=False, separators=(",", ":")).encode()
    return _COMMENT.sub("", data.decode()).encode() if _OF_PAGES.fullmatch(name) else data


def main() -> int:
    import zopfli

    (wheel,) = map(Path, sys.argv[1:])
    with zipfile.ZipFile(wheel) as opened:
        infos = [info for info in opened.infolist() if not info.is_dir()]
        files = {info.filename: slim(info.filename, opened.read(info)) for info in infos}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, "", ""] if name == record else [name, f"sha256={digest}", len(data)])
    files[record] = lines.getvalue().encode()
    before, made = wheel.stat().st_size, wheel.with_suffix(".new")
    with zopfli.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as written:
        for info in infos:
            written.writestr(info, files[info.filename])
    os.replace(made, wheel)
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, before {before:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
