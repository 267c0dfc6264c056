"""When a silent peer is pinged, and when it is given up."""

from __future__ import annotations

from omni_ws.transport.native.keep_alive import KeepAlive, KeepAliveSettings


def check(alive: KeepAlive, now: float, *, listening: bool = True) -> str:
    pings: list[str] = []
    there = alive.check(now, lambda: pings.append("pinged"), listening=listening)
    return "".join(pings) or ("alive" if there else "gone")


def test_silent_peer_is_pinged_then_given_up() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=100)
    assert alive.get_timer(listening=True) == 120
    assert check(alive, 119.9) == "alive"
    assert check(alive, 120) == "pinged"
    assert alive.get_timer(listening=True) == 125
    assert check(alive, 124.9) == "alive"
    assert check(alive, 125) == "gone"


def test_any_sign_of_life_counts() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=100)
    assert check(alive, 120) == "pinged"
    alive.heard(120)  # within the resolution of the clock
    assert alive.get_timer(listening=True) == 140
    assert check(alive, 125) == "alive"
    assert check(alive, 140) == "pinged"


def test_who_does_not_listen_gives_up_nobody_and_pings_all_the_same() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=0)
    assert check(alive, 20, listening=False) == "pinged"
    assert alive.get_timer(listening=False) == 40
    assert check(alive, 25, listening=False) == "alive"
    assert check(alive, 40, listening=False) == "pinged"
    alive.heard(50)
    assert alive.get_timer(listening=True) == 70


def test_without_a_timeout_it_goes_on_pinging() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=None), now=0)
    assert [check(alive, now) for now in (20, 40, 60)] == ["pinged"] * 3


def test_turned_off() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=None, ping_timeout=5), now=0)
    assert alive.get_timer(listening=True) is None
    assert check(alive, 1e9) == "alive"
