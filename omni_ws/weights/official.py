"""Weights from where their maker publishes them, over HTTP."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from omni_ws.weights.error import WeightsError
from omni_ws.weights.fetching import Fetching, Progress, settle
from omni_ws.weights.lock import PinnedFile, PinnedWeights

_BLOCK: Final = 1 << 18


class OfficialSource:
    """Downloads by HTTP, and goes on where an earlier download broke off.

    Gives up soon, as there are other sources: if no answer comes within ``open_sec``, nothing more within
    ``stall_sec``, or, measured since the download of a file began and after ``stall_sec``, less than
    ``least_bytes_per_sec``. A host that did not answer in time is not asked again.
    """

    name = "official"

    def __init__(self, *, open_sec: float = 5, stall_sec: float = 10, least_bytes_per_sec: float = 100_000) -> None:
        self._open_sec = open_sec
        self._stall_sec = stall_sec
        self._least_bytes_per_sec = least_bytes_per_sec
        self._silent: set[str] = set()

    def fetch(self, weights: PinnedWeights, missing: Sequence[PinnedFile], folder: Path, fetching: Fetching) -> None:
        if weights.official is None:
            raise WeightsError("there is none")
        for file in missing:
            part = folder / f"{file.name}.part"
            resumed = part.exists()
            try:
                self._download(weights, file, part, fetching)
                settle(part, file, folder)
            except WeightsError:
                # What was kept may have been damaged: once more from the beginning, if that is what is wrong.
                if not resumed or part.exists():
                    raise
                self._download(weights, file, part, fetching)
                settle(part, file, folder)

    def _download(self, weights: PinnedWeights, file: PinnedFile, part: Path, fetching: Fetching) -> None:
        have = part.stat().st_size if part.exists() else 0
        if have >= file.size:
            part.unlink()
            have = 0
        url = f"{weights.official}{quote(file.name)}"
        with closing(self._opened(url, have)) as response:
            have = self._begin(response, have)
            began, had = time.monotonic(), have
            with part.open("r+b" if have else "wb") as opened:
                opened.truncate(have)
                opened.seek(have)
                while block := self._read(response):
                    fetching.go_on()
                    have += len(block)
                    if have > file.size:
                        raise WeightsError(f"{url} is longer than the pinned {file.size} bytes")
                    opened.write(block)
                    fetching.progress(Progress(weights.name, file.name, have, file.size))
                    passed = time.monotonic() - began
                    if passed > self._stall_sec and have - had < passed * self._least_bytes_per_sec:
                        raise WeightsError(f"{url} is slow: {have - had} bytes in {passed:.0f} s")
        if have < file.size:
            raise WeightsError(f"{url} ended after {have} of {file.size} bytes")

    def _opened(self, url: str, have: int) -> http.client.HTTPResponse:
        """The answer. A thread waits for it, since the look-up of a name knows no time-out."""
        host = urlsplit(url).netloc
        if host in self._silent:
            raise WeightsError(f"{host} did not answer before")
        headers = {"User-Agent": "omni_ws"} | ({"Range": f"bytes={have}-"} if have else {})
        answer: Future[http.client.HTTPResponse] = Future()

        def opening() -> None:
            try:
                answer.set_result(urlopen(Request(url, headers=headers), timeout=self._stall_sec))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=opening, name="weights-official", daemon=True).start()
        try:
            return answer.result(self._open_sec)
        except TimeoutError:
            answer.add_done_callback(_close)
            self._silent.add(host)
            raise WeightsError(f"{url} did not answer within {self._open_sec:g} s") from None
        except HTTPError as error:
            error.close()
            raise WeightsError(f"{url} answered {error.code}") from None
        except (URLError, http.client.HTTPException, OSError) as error:
            raise WeightsError(f"{url}: {getattr(error, 'reason', error)}") from None

    @staticmethod
    def _begin(response: http.client.HTTPResponse, have: int) -> int:
        """From which byte on the answer is."""
        if response.status == http.HTTPStatus.PARTIAL_CONTENT and have:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise WeightsError("the answer is another part of the file than was asked for")
            return have
        if response.status != http.HTTPStatus.OK:
            raise WeightsError(f"the answer has the status {response.status}")
        return 0

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_BLOCK)
        except TimeoutError:
            raise WeightsError(f"nothing came for {self._stall_sec:g} s") from None
        except (http.client.HTTPException, OSError) as error:
            raise WeightsError(f"the connection broke: {error}") from None


def _close(answer: Future[http.client.HTTPResponse]) -> None:
    """Ends an answer that came too late."""
    if answer.exception() is None:
        answer.result().close()
