"""What every test in a browser needs: the browser, and a tap at the loudspeaker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.chromium import TAP_PROCESSOR, shared_chromium

from omni_ws.transport.routes import operations

if TYPE_CHECKING:
    from playwright.async_api import Browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One for all tests; each has a page, permissions and a storage of its own."""
    async with shared_chromium(tmp_path_factory.mktemp("browser")) as shared:
        yield shared


# Not of the package: without an __init__.py that lasts until the end of all tests.
@pytest.fixture(autouse=True, scope="module")
def _tap_at_the_speaker() -> Iterator[None]:
    """The file that runs on the page's audio thread gets a second processor, which keeps what is played."""
    files = dict(operations.page_files())
    worklet = files["client/playback-worklet.js"]
    content = worklet.content + TAP_PROCESSOR.encode()
    files["client/playback-worklet.js"] = operations.PageFile.of(content, worklet.media_type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "page_files", lambda: files)
        yield
