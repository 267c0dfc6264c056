"""The limit on open files, and so on connections, of this process."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

#: Files that the server opens besides the connections of its clients.
_OWN_FILES: Final = 128


def allow_connections(count: int) -> None:
    """Raise the soft limit to the hard limit, and warn if that is too low for ``count`` connections."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS refuses an infinite limit
            logger.debug("the limit of open files stays at %d", soft)
    if soft != resource.RLIM_INFINITY and count + _OWN_FILES > soft:
        logger.warning(
            "limits.max_connections is %d, but this process can open only %d files: raise the limit (ulimit -Hn, "
            "LimitNOFILE) to %d, or lower limits.max_connections",
            count,
            soft,
            count + _OWN_FILES,
        )
