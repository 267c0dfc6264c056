"""What a configuration that cannot be used looks like to its caller."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigurationError(ValueError):
    """The server cannot start as configured. Never crosses the wire: it is printed, and the process exits with 2.

    ``problems`` holds one finished sentence for each thing that is wrong, all of them at once.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
