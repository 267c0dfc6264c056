"""The soak notices what is wrong, and excuses only what a fault explains."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.live_server import live_server
from support.patience import PATIENCE_SEC

from benchmarks.soak import Soak, growth
from benchmarks.soak_clients import Talker, Tally
from benchmarks.soak_loudspeaker import PlayedAnswer
from benchmarks.soak_microphones import Findings, OpenMicrophone, scene
from benchmarks.soak_network import connect_from_beyond, link_to_cut
from benchmarks.soak_server import KEY, SoakedServer
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.engine.base import Engine, PartFailed
from omni_ws.engine.fake import EchoEngine, ScriptedEngine
from omni_ws.errors import EngineFailed

KEYS = (ApiKey(name="soak", key_sha256=digest(KEY)),)


class OnlyText(random.Random):
    """Draws sums, never recordings."""

    def random(self) -> float:
        return 0.5

    def getrandbits(self, k: int, /) -> int:
        return 1


class OnlySpeech(OnlyText):
    """Draws recordings, never sums."""

    def random(self) -> float:
        return 0.9


async def talked(engine: Engine, tally: Tally, generator: random.Random | None = None) -> Tally:
    async with live_server(engine, keys=KEYS, expect_errors=True) as server:
        await Talker(server.websocket_url, tally, generator or OnlyText(), asyncio.Lock()).talk()
    return tally


async def test_a_server_that_answers_otherwise_is_found() -> None:
    tally = await talked(EchoEngine(), Tally())
    assert tally.counts["answers"] > 0
    assert any(line.startswith("said 'what is ") for line in tally.wrong)
    assert "no audio" in tally.wrong


async def test_a_missing_voice_is_excused_while_voices_are_killed_and_the_words_are_not() -> None:
    tally = await talked(EchoEngine(), Tally(faults={"voice": time.monotonic() + 3600}))
    assert tally.wrong
    assert all(line.startswith("said 'what is ") for line in tally.wrong)


async def test_a_recogniser_that_is_not_loaded_is_excused_while_descriptors_are_taken_and_not_else() -> None:
    deaf = ScriptedEngine([PartFailed(EngineFailed("deaf", param="asr"))])
    excused = await talked(deaf, Tally(faults={"descriptors": time.monotonic() + 3600}), OnlySpeech())
    assert excused.wrong == []
    assert excused.counts["turns without a recogniser for lack of descriptors"] > 0
    assert excused.counts["answers"] == 0
    found = await talked(deaf, Tally(faults={"voice": time.monotonic() + 3600}), OnlySpeech())
    assert "engine_failed asr" in found.wrong


async def test_a_server_that_is_not_there_is_excused_while_it_is_killed_and_not_else() -> None:
    for faults, found in (({}, 1), ({"voice": time.monotonic() + 3600}, 1), ({"server": time.monotonic() + 3600}, 0)):
        tally = Tally(faults=dict(faults))
        await Talker("ws://127.0.0.1:9/", tally, OnlyText(), asyncio.Lock()).talk()
        assert len(tally.wrong) == found
        assert tally.counts["cut"] == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the process of the link is forked
async def test_talkers_behind_a_cut_link_lose_no_answer() -> None:
    with link_to_cut(1) as link:
        if link is None:
            pytest.skip("no network namespace: it needs root, /dev/net/tun and ip")
        async with live_server(EchoEngine(), keys=KEYS, host="0.0.0.0") as server:

            async def reach() -> socket.socket:
                connection = await connect_from_beyond(server.port)
                link.cut(0.5)
                return connection

            tally = Tally()
            await Talker(server.websocket_url, tally, OnlyText(), asyncio.Lock(), reach=reach).talk()
    assert tally.counts["sessions over the link"] == 1
    assert tally.counts["answers"] > 0
    assert tally.counts["cut"] == 0


def test_links_take_turns() -> None:
    with link_to_cut(1) as link:
        if link is None:
            pytest.skip("no network namespace: it needs root, /dev/net/tun and ip")
        code = "from benchmarks.lossy_link import lossy_link\nwith lossy_link(): print('in')"
        second = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            second.communicate(timeout=1)
    assert second.communicate(timeout=PATIENCE_SEC)[0] == "in\n"


def test_a_run_without_an_answer_is_a_defect(tmp_path: Path) -> None:
    assert not Soak(SoakedServer(tmp_path, tmp_path / "log"), 1, 1)._report()


@pytest.mark.parametrize(
    ("values", "grown"),
    [
        ([500.0, 501.0, 594.0, 595.0], 2),  # a recogniser was loaded
        ([400.0, *(400.0 + 93 * number for number in range(1, 6))], 93),  # a life loads four
        ([500.0, 579.9], 79.9),
        ([500.0, 580.0], 0),
        ([500.0, 610.0], 0),
        ([500.0, 610.1], 110.1),
    ],
)
def test_a_recogniser_that_is_loaded_late_is_no_growth(values: list[float], grown: float) -> None:
    assert growth(values) == pytest.approx(grown)


# open microphones


class Interrupter(OpenMicrophone):
    """Talks over an answer once it has heard 3 s of it, and then asks something else."""

    async def _behave(self, seconds: float, tasks: list[asyncio.Task[None]]) -> None:
        await self._speak()
        await self._until(lambda: any(answer.played_ms > 3000 for answer in self._played))
        await self._speak()
        await self._settle()

    @property
    def _played(self) -> list[PlayedAnswer]:
        self._speaker.play(self._now)
        return [*self._answers.values()]


class Liar(Interrupter):
    """Says that it has played less than it has."""

    def told_ms(self, answer: PlayedAnswer) -> float:
        return max(0.0, answer.played_ms - 1500)


async def compared(microphone: type[OpenMicrophone] = Interrupter) -> list[str]:
    findings = Findings()
    async with scene("a test") as (server, scenes):
        await microphone(server, scenes, findings, "a test", 1).talk(0)
    assert findings.counts["histories compared"] > 1
    assert findings.wrong == []
    return findings.differences


@pytest.mark.virtual_clock
async def test_what_was_played_is_what_the_model_is_given() -> None:
    assert await compared() == []


@pytest.mark.virtual_clock
async def test_a_loudspeaker_that_is_said_to_be_elsewhere_is_a_difference() -> None:
    (difference,) = await compared(Liar)
    assert "message 1" in difference


@pytest.mark.virtual_clock
async def test_a_word_of_an_answer_too_many_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Ledger._heard_text

    def one_more(self: Ledger, entry: LedgerEntry, cut_ms: float | None) -> str:
        words = len(heard(self, entry, cut_ms).split())
        return " ".join(entry.said.joined().split()[: words + 1])

    monkeypatch.setattr(Ledger, "_heard_text", one_more)
    (difference,) = await compared()
    assert "message 1" in difference


@pytest.mark.virtual_clock
async def test_a_word_that_is_not_written_down_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    hear = LedgerEntry.hear
    monkeypatch.setattr(LedgerEntry, "hear", lambda self, text, **more: hear(self, " ".join(text.split()[:-1]), **more))
    assert any("message 0" in difference for difference in await compared())
