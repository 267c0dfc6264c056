"""WholeFrames: cuts a stream of raw audio at the boundaries of its frames."""

from __future__ import annotations


class WholeFrames:
    """Returns the whole frames (one sample of each channel) of a stream, and keeps what is incomplete."""

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._carry = b""

    def take(self, data: bytes) -> bytes:
        """Return the frames that ``data`` completes."""
        if self._carry:
            data = self._carry + data
            self._carry = b""
        if rest := len(data) % self._frame_bytes:
            whole = len(data) - rest
            self._carry = bytes(data[whole:])
            data = data[:whole]
        return data

    def drop(self) -> None:
        """Drop an incomplete frame."""
        self._carry = b""
