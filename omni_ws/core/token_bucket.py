"""TokenBucket: a rate, with some room for what comes at once. No clock."""

from __future__ import annotations


class TokenBucket:
    """Fills at ``rate`` tokens a second up to ``capacity``, with which it begins.

    ``now`` is any monotonic clock in seconds.
    """

    def __init__(self, *, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        #: What is there, as of ``_filled_at``; below zero where more was spent than there was.
        self._tokens = capacity
        self._filled_at = now

    def try_take(self, amount: float = 1, *, now: float) -> float:
        """Take ``amount`` if it is there: 0. Otherwise take nothing: the seconds until it will be."""
        self._fill(now)
        if self._tokens < amount:
            return self._until(amount)
        self._tokens -= amount
        return 0

    def spend(self, amount: float, *, now: float) -> float:
        """Take ``amount`` whether it is there or not: the seconds until the debt, if there is one, is paid."""
        self._fill(now)
        self._tokens -= amount
        return self._until(0)

    def _fill(self, now: float) -> None:
        self._tokens = min(self.capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now

    def _until(self, tokens: float) -> float:
        return max(0.0, (tokens - self._tokens) / self.rate)
