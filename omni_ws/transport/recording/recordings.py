"""The recordings of a server, as configured."""

from __future__ import annotations

import asyncio
from typing import Self

from omni_ws.config.model import ServerConfig
from omni_ws.service.recording.recorder import Recorder, RecordingChoice, RecordingFolder
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.recording.recorded_exchange import HttpRecordings


class Recordings:
    """The recorder of a server, and its recordings of HTTP requests."""

    def __init__(self, recorder: Recorder, http: HttpRecordings) -> None:
        self.recorder = recorder
        self.http = http

    @classmethod
    def configured(cls, config: ServerConfig, sessions: SessionFactory, *, sessions_path: str) -> Self | None:
        """None where nothing is to be recorded. Raises ConfigurationError for a folder that cannot be used."""
        if config.record is None:
            return None
        group = sessions.group
        folder = RecordingFolder(
            config.record,
            max_bytes=config.record_max_bytes,
            max_age=config.record_max_age_sec,
            owns=(lambda name: True) if group is None else group.owns_file,
        )
        folder.prepare()
        choice = RecordingChoice(
            fraction=config.record_fraction, keys=frozenset(config.record_keys), payloads=config.record_payloads
        )
        recorder = Recorder(folder, engine=sessions.engine.name, model=lambda: sessions.model.names[0], choice=choice)
        idle_sec = config.streaming_input.session_timeout_sec
        http = HttpRecordings(recorder, sessions_path=sessions_path, idle_sec=idle_sec, worker=sessions.worker)
        return cls(recorder, http)

    async def close(self) -> None:
        """End all recordings, and write what waits. Called when nothing is served any more."""
        self.http.close()
        await asyncio.to_thread(self.recorder.close)
