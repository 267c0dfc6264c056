"""The exception for a configuration that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigurationError(ValueError):
    """The server cannot start as configured.

    Never crosses the wire: the command prints it and exits with status 2. ``problems`` holds one sentence for each
    mistake, all of them at once.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
