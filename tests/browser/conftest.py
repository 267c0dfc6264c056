"""What every test in a browser needs: a tap at the loudspeaker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.chromium import TAP_PROCESSOR

from omni_ws.transport.routes import demo


# Not of the package: without an __init__.py that lasts until the end of all tests.
@pytest.fixture(autouse=True, scope="module")
def _tap_at_the_speaker() -> Iterator[None]:
    """The file that runs on the page's audio thread gets a second processor, which keeps what is played."""
    files = dict(demo._files())
    worklet = files["client/playback-worklet.js"]
    content = worklet.content + TAP_PROCESSOR.encode()
    files["client/playback-worklet.js"] = replace(worklet, content=content, entity_tag='"tapped"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_files", lambda: files)
        yield
