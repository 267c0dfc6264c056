"""How long tests wait for an event before they count as failed."""

from __future__ import annotations

from typing import Final

#: Far longer than anything takes on a machine with fifteen programs to a core; less than pytest gives a test, so that
#: the wait that failed is named.
PATIENCE_SEC: Final = 500.0
