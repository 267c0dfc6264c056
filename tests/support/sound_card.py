"""A library ``sounddevice`` for programs under test."""

from __future__ import annotations

from typing import Final

#: A sound card in real time. It records a file, and, ECHO times as loud, what it played 120 ms ago.
SOUND_LIBRARY: Final = """
import atexit, os, threading, time
import numpy as np, soxr

class PortAudioError(Exception):
    pass

DEVICES = [
    {"name": "Headset", "max_input_channels": 1, "max_output_channels": 2},
    {"name": "Loudspeakers", "max_input_channels": 0, "max_output_channels": 2},
]

def query_devices(device=None, kind=None):
    return DEVICES if kind is None else {"default_samplerate": 16000.0}

def check_input_settings(**settings):
    pass

check_output_settings = check_input_settings

class _Stream:
    latency = 0.05
    # One clock for all, as on a card: on a machine that is late, echo and speech stay where they are to each other.
    started = []
    clock = None
    ended = threading.Event()

    def __init__(self, *, samplerate, channels, dtype, callback, device=None, blocksize=None):
        self.size = 2 * (blocksize or samplerate // 50)
        self.interval = self.size / 2 / samplerate
        self.callback = callback

    def start(self):
        self.due = time.monotonic() + self.interval
        _Stream.started = [*_Stream.started, self]
        if _Stream.clock is None:
            _Stream.clock = threading.Thread(target=_Stream.run, daemon=True)
            _Stream.clock.start()

    @staticmethod
    def run():
        while not _Stream.ended.is_set():
            if not _Stream.started:
                time.sleep(0.005)
                continue
            stream = min(_Stream.started, key=lambda one: one.due)
            time.sleep(max(0.0, stream.due - time.monotonic()))
            stream.due += stream.interval
            stream.turn()

    @atexit.register
    def end():  # a thread that still runs C++ when the interpreter ends would abort the process
        _Stream.ended.set()
        if _Stream.clock is not None:
            _Stream.clock.join()

    def stop(self):
        _Stream.started = [one for one in _Stream.started if one is not self]

    close = stop

    def __enter__(self):
        self.start()

    def __exit__(self, *error):
        self.close()

class RawInputStream(_Stream):
    recording = open(os.environ["RECORDING"], "rb").read()
    air = bytearray(2 * 120 * 16)

    def start(self):
        del self.air[: -2 * 120 * 16]
        super().start()

    def turn(self):
        data, self.recording = self.recording[: self.size], self.recording[self.size :]
        echo = np.frombuffer(self.air[: self.size].ljust(self.size, b"\\0"), "<i2") * float(os.environ.get("ECHO", 0))
        del self.air[: self.size]
        heard = np.frombuffer(data.ljust(self.size, b"\\0"), "<i2") + echo
        self.callback(heard.clip(-32768, 32767).astype("<i2").tobytes(), self.size // 2, None, None)

class RawOutputStream(_Stream):
    to_air = soxr.ResampleStream(24000, 16000, 1, dtype="int16")

    def turn(self):
        data = bytearray(self.size)
        self.callback(data, self.size // 2, None, None)
        RawInputStream.air += self.to_air.resample_chunk(np.frombuffer(data, "<i2")).tobytes()
"""
