"""RungeKutta: solves a differential equation by one evaluation at a time, by the 3/8 rule of fourth order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

_THIRD = 1 / 3


class RungeKutta:
    """Between evaluations: the derivative is asked for at ``time`` and ``point``, and given to ``take``.

    ``times`` are the ends of the steps, the first one the begin. ``value`` is the solution as far as it is known.
    """

    def __init__(self, begin: Tensor, times: Sequence[float]) -> None:
        self.value = self.point = begin
        self.time = times[0]
        self._steps = list(pairwise(times))[::-1]
        self._slopes: list[Tensor] = []

    @property
    def done(self) -> bool:
        """Whether ``value`` is the solution at the last of ``times``."""
        return not self._steps

    def take(self, slope: Tensor) -> None:
        """Go on with the derivative that was asked for."""
        begin, end = self._steps[-1]
        step = end - begin
        self._slopes.append(slope)
        match self._slopes:
            case [k1]:
                self.time, self.point = begin + step * _THIRD, self.value + k1 * (step * _THIRD)
            case [k1, k2]:
                self.time, self.point = begin + step * 2 * _THIRD, self.value + (k2 - k1 * _THIRD) * step
            case [k1, k2, k3]:
                self.time, self.point = end, self.value + (k1 - k2 + k3) * step
            case [k1, k2, k3, k4]:
                self.value = self.point = self.value + (k1 + 3 * (k2 + k3) + k4) * (step / 8)
                self.time = end
                self._steps.pop()
                self._slopes = []
