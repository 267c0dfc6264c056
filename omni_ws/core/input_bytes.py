"""The bytes of an input: how many have arrived, how many are held, and for how many there is room."""

from __future__ import annotations

from omni_ws.core.quota import ByteBudget
from omni_ws.core.stream_limits import StreamLimits
from omni_ws.errors import PayloadTooLarge


class InputBytes:
    """Counts the bytes of one input against its limits and the server's budget.

    ``budget`` is shared by all inputs of the server.
    """

    def __init__(self, limits: StreamLimits, budget: ByteBudget, *, single_request: bool = False) -> None:
        self.limits = limits
        #: Whether a chunk after the end of the first request is a conflict instead of a second request.
        self.single_request = single_request
        #: Bytes accepted or buffered that no engine has taken over.
        self.held_bytes = 0
        #: Of these, those that wait behind a gap.
        self.waiting_bytes = 0
        #: Bytes that were accepted in order.
        self.received_bytes = 0
        self._budget = budget
        self._closed = False

    def close(self) -> None:
        """Release everything. What arrives later is not counted."""
        self._release(self.held_bytes)
        self._closed = True

    def hold_waiting(self, size: int) -> None:
        """Count ``size`` more bytes that wait behind a gap.

        Raises PayloadTooLarge or EngineOverloaded where there is no room.
        """
        self._check_total(size)
        self._hold(size)
        self.waiting_bytes += size

    def release_waiting(self, size: int) -> None:
        self._release(size)
        self.waiting_bytes -= size

    def _check_total(self, size: int) -> None:
        if self.single_request and (excess := self.excess(self.received_bytes + self.waiting_bytes + size)):
            raise excess

    def excess(self, total: int) -> PayloadTooLarge | None:
        """The error for an input of so many bytes in all, if that is too much."""
        most = self.limits.max_total_bytes
        if most is None or total <= most:
            return None
        error = PayloadTooLarge(f"the input exceeds {most} bytes in total", param="payload")
        error.of_request = not self.single_request
        return error

    def _hold(self, size: int, *, counted: bool = False) -> None:
        """Count ``size`` more bytes. There is room for them, and no check, where they were ``counted`` before."""
        if self._closed:
            return
        if counted:
            self._release(-size)
            return
        if self.held_bytes + size > self.limits.max_held_bytes:
            raise PayloadTooLarge(
                f"more than {self.limits.max_held_bytes} bytes of input are waiting for the engine; send more slowly"
            )
        self._budget.take(size)
        self.held_bytes += size

    def _release(self, size: int) -> None:
        if not self._closed:
            self._budget.give(size)
            self.held_bytes -= size
