"""Checks that a bill of materials names the packages of the lock, and nothing else: `check_bill.py BILL LOCK`.

The bill is CycloneDX in JSON, of an environment that holds the wheel; the lock is requirements/server.lock. The Python
that runs this has to be of the same version and platform as that environment.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "omni-ws"


def locked(text: str) -> dict[str, str]:
    """The versions of the lock by name, as far as they concern this Python."""
    versions = {}
    for line in re.findall(r"(?m)^[a-z][^\\\n]+", text):
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate():
            (pin,) = one.specifier
            versions[canonicalize_name(one.name)] = pin.version
    return versions


def problems(bill: dict[str, object], lock: dict[str, str]) -> list[str]:
    """What the bill says otherwise than the lock, a line each."""
    components = bill["components"]
    assert isinstance(components, list)
    found = {canonicalize_name(one["name"]): one for one in components}
    said = [f"{PROJECT} is missing"] if PROJECT not in found else []
    said += [f"{name} {version} is missing" for name, version in lock.items() if name not in found]
    for name, one in found.items():
        if name == PROJECT:
            continue
        if name not in lock:
            said.append(f"{name} is not in the lock")
        elif one["version"] != lock[name]:
            said.append(f"{name} is {one['version']}, and {lock[name]} in the lock")
        elif one.get("purl") != f"pkg:pypi/{name}@{lock[name]}":
            said.append(f"{name} has the address {one.get('purl')}")
    return said


def main(bill: str, lock: str) -> int:
    said = problems(json.loads(Path(bill).read_text(encoding="utf-8")), locked(Path(lock).read_text(encoding="utf-8")))
    for line in said:
        print(f"{bill}: {line}", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
