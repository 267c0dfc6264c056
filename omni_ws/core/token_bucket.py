"""TokenBucket: a rate limiter that allows bursts."""

from __future__ import annotations


class TokenBucket:
    """A token bucket, full at first, that refills at ``rate`` tokens a second up to ``capacity``.

    ``now`` is in seconds of any monotonic clock and must not decrease.
    """

    def __init__(self, *, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        #: The tokens as of ``_filled_at``; negative after an overdraft by ``spend``.
        self._tokens = capacity
        self._filled_at = now

    def try_take(self, amount: float = 1, *, now: float) -> float:
        """Take ``amount`` tokens and return 0, or take none and return the seconds until there are enough."""
        self._fill(now)
        if self._tokens < amount:
            return self._until(amount)
        self._tokens -= amount
        return 0

    def spend(self, amount: float, *, now: float) -> float:
        """Take ``amount`` tokens even if there are fewer; returns the seconds until the overdraft is made up, or 0."""
        self._fill(now)
        self._tokens -= amount
        return self._until(0)

    def _fill(self, now: float) -> None:
        self._tokens = min(self.capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now

    def _until(self, tokens: float) -> float:
        return max(0.0, (tokens - self._tokens) / self.rate)
