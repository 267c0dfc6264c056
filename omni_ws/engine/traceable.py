"""The contract of engines whose models can be traced."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class TraceableEngine(Protocol):
    """An engine that can record the operations of its models with torch's profiler, in all its processes."""

    @property
    def can_trace(self) -> bool:
        """Whether the engine was started with tracing enabled."""
        ...

    async def start_trace(self, template: Path) -> None:
        """Start recording. ``template`` is the beginning of the paths of the files to write."""
        ...

    async def stop_trace(self) -> tuple[Path, ...]:
        """Stop recording and return the files."""
        ...
