"""How many files, and so how many connections, this process may have open."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

#: What the server opens besides its clients' connections.
_OWN_FILES: Final = 128


def allow_connections(count: int) -> None:
    """Raise the limit to the highest that the system allows this process, and warn where it is below ``count``."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # where "no limit" is not to be had
            logger.debug("the limit of open files stays at %d", soft)
    if soft != resource.RLIM_INFINITY and count + _OWN_FILES > soft:
        logger.warning(
            "limits.max_connections is %d, and this process may open %d files: raise that limit (ulimit -Hn, "
            "LimitNOFILE) to %d, or lower limits.max_connections",
            count,
            soft,
            count + _OWN_FILES,
        )
