"""``python -m omni_ws`` runs the command ``omni-ws``."""

import sys

from omni_ws.installing import wrong_python

try:
    from omni_ws.cli import run

    run()
except ModuleNotFoundError as missing:
    sys.exit(f"omni-ws: {wrong_python(missing, '-m omni_ws serve')}")
