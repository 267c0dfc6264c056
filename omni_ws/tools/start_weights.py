"""``omni-ws serve --fetch``: fetches, before the start, what the server would use and this machine does not have."""

from __future__ import annotations

import sys

from omni_ws.config.model import ServerConfig
from omni_ws.engine_choice.available import wanted_weights
from omni_ws.installing import fetch_command
from omni_ws.tools.progress_lines import ProgressLines
from omni_ws.weights import Fetching, WeightsError, weights_cache


def fetch_for_start(config: ServerConfig) -> None:
    """Blocks until all were fetched, or cannot be: that is said in one sentence, and no reason not to start."""
    cache = weights_cache()
    failed = []
    for weights in wanted_weights(config):
        try:
            with ProgressLines(sys.stderr) as progress:
                cache.fetch(weights, Fetching(progress))
        except WeightsError:
            failed.append(weights.name)
    if failed:
        print(
            f"cannot fetch {' and '.join(failed)} now: the server starts without, and the next start tries again "
            f"({fetch_command(failed[0])} tells why)",
            file=sys.stderr,
        )
