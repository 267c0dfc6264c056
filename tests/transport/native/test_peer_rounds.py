"""When the peers of many connections are looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from omni_ws.transport.native.keep_alive import KeepAliveSettings, PeerRounds

#: A twentieth of the interval is a second.
SETTINGS = KeepAliveSettings(ping_interval=20, ping_timeout=40)


@dataclass(eq=False)
class Silent:
    """A peer that is looked at ``every`` so many seconds; never again with None."""

    every: float | None = None
    looked_at: list[float] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None

    def check_peer(self, now: float) -> float | None:
        self.looked_at.append(now)
        self.meanwhile()
        return None if self.every is None else now + self.every


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_clock
async def test_each_peer_is_looked_at_in_time_and_at_most_a_round_late() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    peers = {when: Silent() for when in (0.2, 3.0, 3.1, 19.99, 40.0)}
    for when in (40.0, 3.1, 0.2, 3.0, 19.99):
        rounds.watch(peers[when].check_peer, begin + when)
    await asyncio.sleep(60)
    for when, peer in peers.items():
        assert len(peer.looked_at) == 1
        assert begin + when <= peer.looked_at[0] < begin + when + 1


@pytest.mark.virtual_clock
async def test_peers_of_one_round_are_looked_at_together() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    peers = [Silent() for _ in range(30)]
    for number, peer in enumerate(peers):
        rounds.watch(peer.check_peer, begin + 7.02 + number * 0.03)
    await asyncio.sleep(10)
    assert len({time for peer in peers for time in peer.looked_at}) == 1


@pytest.mark.virtual_clock
async def test_they_are_looked_at_again_as_they_say() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    peer = Silent(every=20)
    rounds.watch(peer.check_peer, begin + 20)
    await asyncio.sleep(90)
    assert peer.looked_at == pytest.approx([begin + at for at in (20, 40, 60, 80)], abs=1.1)


@pytest.mark.virtual_clock
async def test_the_last_word_counts() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    sooner, later, never, gone = (Silent() for _ in range(4))
    for peer in (sooner, later, never, gone):
        rounds.watch(peer.check_peer, begin + 10)
    rounds.watch(sooner.check_peer, begin + 5)
    rounds.watch(later.check_peer, begin + 15)
    rounds.watch(never.check_peer, None)
    rounds.forget(gone.check_peer)
    rounds.forget(gone.check_peer)
    await asyncio.sleep(30)
    assert sooner.looked_at == pytest.approx([begin + 5], abs=1)
    assert later.looked_at == pytest.approx([begin + 15], abs=1)
    assert never.looked_at == gone.looked_at == []


@pytest.mark.virtual_clock
async def test_who_goes_in_the_middle_of_a_round_is_not_looked_at() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    second = Silent()
    first = Silent(meanwhile=lambda: rounds.forget(second.check_peer))
    rounds.watch(first.check_peer, begin + 5)
    rounds.watch(second.check_peer, begin + 5)
    await asyncio.sleep(10)
    assert (len(first.looked_at), second.looked_at) == (1, [])


@pytest.mark.virtual_clock
@pytest.mark.counts_passes
async def test_a_large_round_lets_others_in_between() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()
    seen: list[int] = []
    others: list[int] = []

    async def other() -> None:
        while len(seen) < 100:
            others.append(len(seen))
            await asyncio.sleep(0)

    def look() -> None:
        if not seen:
            tasks.append(asyncio.create_task(other()))
        seen.append(len(seen))

    tasks: list[asyncio.Task[None]] = []
    for _ in range(100):
        rounds.watch(Silent(every=20, meanwhile=look).check_peer, begin + 5)
    await asyncio.sleep(10)
    assert len(seen) == 100
    assert max(later - earlier for earlier, later in pairwise(others)) <= 32
    await asyncio.gather(*tasks)


@pytest.mark.virtual_clock
async def test_one_whose_check_fails_keeps_no_other_from_being_looked_at() -> None:
    rounds, begin = PeerRounds(SETTINGS), now()

    def fail() -> None:
        raise RuntimeError("a check that fails")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    failing, other, later = Silent(every=20, meanwhile=fail), Silent(every=20), Silent()
    for peer, when in ((failing, 5), (other, 5), (later, 8)):
        rounds.watch(peer.check_peer, begin + when)
    try:
        await asyncio.sleep(30)
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert (len(failing.looked_at), len(other.looked_at), len(later.looked_at), len(told)) == (1, 2, 1, 1)


@pytest.mark.virtual_clock
async def test_without_pings_nobody_is_looked_at() -> None:
    rounds = PeerRounds(KeepAliveSettings(ping_interval=None, ping_timeout=None))
    peer = Silent()
    rounds.watch(peer.check_peer, None)
    await asyncio.sleep(100)
    assert peer.looked_at == []
