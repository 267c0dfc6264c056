"""Offers and answers: the SDP of a call (RFC 9429), by aiortc."""

from __future__ import annotations

import ipaddress
import logging
from typing import Final

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.exceptions import OperationError
from aiortc.sdp import SessionDescription

from omni_ws.config.model import WebrtcConfig
from omni_ws.errors import InvalidFrame, InvalidValue, UnsupportedFormat
from omni_ws.transport.webrtc.channel import LABEL
from omni_ws.transport.webrtc.microphone import CallMicrophone
from omni_ws.transport.webrtc.speaker import CallSpeaker

logger = logging.getLogger(__name__)

#: Addresses that an offer may name: the server sends packets to each of them, which hold the fragment.
MAX_CANDIDATES: Final = 16
#: RFC 8839, 5.4, in characters.
MAX_UFRAG: Final = 256
_CANDIDATE: Final = "a=candidate:"
#: The kind of address that a server gives, by the scheme of its URL (RFC 8839, 5.1).
_GIVEN: Final = {"stun": "srflx", "turn": "relay", "turns": "relay"}


def new_peer(config: WebrtcConfig) -> RTCPeerConnection:
    """A connection that asks the configured ICE servers alone, and none without any."""
    credential = config.ice_credential
    servers = [
        RTCIceServer(
            urls=url,
            username=config.ice_username,
            credential=None if credential is None else credential.get_secret_value(),
        )
        for url in config.ice_servers
    ]
    return RTCPeerConnection(RTCConfiguration(iceServers=servers))


def check_offer(offer: str) -> str:
    """The offer as the library is to see it. Raises InvalidFrame, InvalidValue or UnsupportedFormat.

    Candidates with names, such as those of the local network (RFC 8828), are left out, since to resolve them takes
    seconds and a multicast socket; the caller's own packets show where it is. So is the end of candidates, behind which
    the library would not wait for those packets.
    """
    lines = [line for line in offer.splitlines() if line and line != "a=end-of-candidates"]
    lines = [line for line in lines if not line.startswith(_CANDIDATE) or _is_address(_address(line))]
    if sum(line.startswith(_CANDIDATE) for line in lines) > MAX_CANDIDATES:
        raise InvalidValue(f"an offer may have at most {MAX_CANDIDATES} candidates", param="sdp")
    offer = "\r\n".join([*lines, ""])
    try:
        media = SessionDescription.parse(offer).media
    except Exception:  # the library raises whatever its parser meets
        raise InvalidFrame("the offer is not valid SDP", param="sdp") from None
    kinds = [one.kind for one in media]
    if kinds.count("audio") != 1 or kinds.count("application") != 1 or len(kinds) != 2:
        raise UnsupportedFormat(f"an offer has one audio track and the data channel {LABEL}", param="sdp")
    for one in media:
        if one.dtls is None or not one.dtls.fingerprints or one.dtls.role is None:
            raise InvalidFrame("an offer must have a=fingerprint and a=setup", param="sdp")
        if one.ice is not None and len(one.ice.usernameFragment or "") > MAX_UFRAG:
            raise InvalidValue(f"a=ice-ufrag has at most {MAX_UFRAG} characters", param="sdp")
    return offer


async def answer_offer(
    peer: RTCPeerConnection, offer: str, speaker: CallSpeaker, microphone: CallMicrophone, *, config: WebrtcConfig
) -> str:
    """The answer to an offer that was checked. Raises InvalidFrame or UnsupportedFormat."""
    peer.addTrack(speaker)
    (transceiver,) = peer.getTransceivers()
    codecs = RTCRtpSender.getCapabilities("audio").codecs
    transceiver.setCodecPreferences([codec for codec in codecs if codec.mimeType == "audio/opus"])
    microphone.connect(transceiver.receiver)
    try:
        await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
        await peer.setLocalDescription()
    except OperationError:
        raise UnsupportedFormat("the offer has no Opus", param="sdp") from None
    except ValueError as error:
        raise InvalidFrame(f"the offer is not acceptable: {str(error)[:100]}", param="sdp") from None
    answer: str = peer.localDescription.sdp
    for url in config.ice_servers:
        if f" typ {_GIVEN[url.partition(':')[0]]} " not in answer:  # the library does not say why
            logger.warning("%s of webrtc.ice_servers gave no address for a call", url)
    return announced(answer, config.announce)


def announced(answer: str, address: str | None) -> str:
    """The answer with ``address`` in place of the machine's own of the same family; those of another are left out."""
    if address is None:
        return answer
    version = ipaddress.ip_address(address).version
    lines = []
    for line in answer.splitlines():
        if line.startswith(_CANDIDATE) and " typ host" in line:
            if ipaddress.ip_address(_address(line)).version != version:
                continue
            line = line.replace(f" {_address(line)} ", f" {address} ", 1)
        lines.append(line)
    return "\r\n".join([*lines, ""])


def _address(candidate: str) -> str:
    """The address of a candidate line (RFC 8839, 5.1), as the library finds it: between any white space."""
    return (candidate.split(maxsplit=5) + [""] * 5)[4]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
