"""When a silent peer is pinged, and when it is given up."""

from __future__ import annotations

from omni_ws.transport.native.keep_alive import KeepAlive, KeepAliveSettings, PeerState


def test_silent_peer_is_pinged_then_given_up() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=100)
    assert alive.get_timer(listening=True) == 120
    assert alive.handle_timer(119.9, listening=True) is PeerState.ALIVE
    assert alive.handle_timer(120, listening=True) is PeerState.SILENT
    assert alive.get_timer(listening=True) == 125
    assert alive.handle_timer(124.9, listening=True) is PeerState.ALIVE
    assert alive.handle_timer(125, listening=True) is PeerState.GONE


def test_any_sign_of_life_counts() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=100)
    assert alive.handle_timer(120, listening=True) is PeerState.SILENT
    alive.heard(120)  # within the resolution of the clock
    assert alive.get_timer(listening=True) == 140
    assert alive.handle_timer(125, listening=True) is PeerState.ALIVE
    assert alive.handle_timer(140, listening=True) is PeerState.SILENT


def test_who_does_not_listen_gives_up_nobody_and_pings_all_the_same() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=5), now=0)
    assert alive.handle_timer(20, listening=False) is PeerState.SILENT
    assert alive.get_timer(listening=False) == 40
    assert alive.handle_timer(25, listening=False) is PeerState.ALIVE
    assert alive.handle_timer(40, listening=False) is PeerState.SILENT
    alive.heard(50)
    assert alive.get_timer(listening=True) == 70


def test_without_a_timeout_it_goes_on_pinging() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=20, ping_timeout=None), now=0)
    assert [alive.handle_timer(now, listening=True) for now in (20, 40, 60)] == [PeerState.SILENT] * 3


def test_turned_off() -> None:
    alive = KeepAlive(KeepAliveSettings(ping_interval=None, ping_timeout=5), now=0)
    assert alive.get_timer(listening=True) is None
    assert alive.handle_timer(1e9, listening=True) is PeerState.ALIVE
