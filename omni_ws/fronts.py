"""The front ends of this package, each created by a function that is its entry point (``config.plugins``)."""

from __future__ import annotations

from omni_ws.app import App
from omni_ws.transport.http.application import FrontEnd
from omni_ws.transport.mode_b.routes import ModeBReaders, ModeBRoutes
from omni_ws.transport.native.endpoint import StreamingInput
from omni_ws.transport.realtime.client_secrets import ClientSecretRoutes
from omni_ws.transport.realtime.live_endpoint import Live
from omni_ws.transport.realtime.session import Realtime
from omni_ws.transport.realtime.translations import Translations
from omni_ws.transport.routes.calls import CallRoutes
from omni_ws.transport.routes.openai import ChatRoutes, CompletionRoutes, SpeechRoutes, TranscriptionRoutes
from omni_ws.transport.routes.operations import OperationsRoutes, ProfilingRoutes
from omni_ws.transport.routes.pages import DemoRoutes
from omni_ws.transport.telephony.audiosocket import AudioSocketCalls
from omni_ws.transport.telephony.media_stream import TelephonyStreams
from omni_ws.transport.webrtc.endpoint import WebrtcCalls
from omni_ws.transport.wyoming.front import WyomingServices


def mode_b_readers(app: App) -> FrontEnd:
    return ModeBReaders(app.config, app.authenticator, app.mode_b, app.recordings)


def streaming_input(app: App) -> FrontEnd:
    return StreamingInput(app.sessions, app.authenticator, app.secrets, app.recorder)


def realtime(app: App) -> FrontEnd:
    return Realtime(app.sessions, app.authenticator, app.secrets, app.recorder)


def live(app: App) -> FrontEnd:
    return Live(app.sessions, app.authenticator, app.recorder)


def client_secrets(app: App) -> FrontEnd:
    return ClientSecretRoutes(app.sessions, app.authenticator, app.secrets)


def translations(app: App) -> FrontEnd:
    return Translations(app.sessions, app.authenticator, app.secrets)


def webrtc(app: App) -> FrontEnd:
    return WebrtcCalls(app.sessions, app.authenticator, app.secrets, app.recorder)


def telephony(app: App) -> FrontEnd:
    return TelephonyStreams(app.sessions, app.authenticator, app.recorder)


def audiosocket(app: App) -> FrontEnd:
    return AudioSocketCalls(app.sessions, app.authenticator, app.recorder)


def wyoming(app: App) -> FrontEnd:
    return WyomingServices(app.sessions, app.authenticator, app.recorder)


def mode_b(app: App) -> FrontEnd:
    return ModeBRoutes(app.sessions, app.authenticator, app.mode_b)


def chat(app: App) -> FrontEnd:
    return ChatRoutes(app.sessions, app.authenticator)


def speech(app: App) -> FrontEnd:
    return SpeechRoutes(app.sessions, app.authenticator)


def completions(app: App) -> FrontEnd:
    return CompletionRoutes(app.sessions, app.authenticator)


def transcriptions(app: App) -> FrontEnd:
    return TranscriptionRoutes(app.sessions, app.authenticator)


def operations(app: App) -> FrontEnd:
    return OperationsRoutes(app.sessions, app.authenticator, app.secrets)


def profiling(app: App) -> FrontEnd:
    return ProfilingRoutes(app.profiling, app.authenticator, app.sessions.group)


def calls(app: App) -> FrontEnd:
    return CallRoutes(app.sessions, app.authenticator, app.recorder)


def demo(app: App) -> FrontEnd:
    return DemoRoutes(app.authenticator, app.config.http.phone_url)
