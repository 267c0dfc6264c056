"""The lines that a recorder of profiler events wrote."""

from __future__ import annotations

import json
from typing import Any

from omni_ws.profiler.events import EventRecorder


def event_lines(recorder: EventRecorder) -> list[dict[str, Any]]:
    """Those of all its files, in the order of time. Closes it."""
    recorder.close()
    lines = [json.loads(line) for path in recorder.paths for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["metadata"]["monotonic_ns"])
