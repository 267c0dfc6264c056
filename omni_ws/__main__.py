"""``python -m omni_ws`` is ``omni-ws``."""

import sys

from omni_ws.cli import main

sys.exit(main())
