"""Processes for models that are forked off one that has imported vLLM, which takes a model's start most of its time.

What the server itself does, a fresh interpreter for each model, is what the tests of its command run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

import pytest

from omni_ws.engine.vllm.language_model import LanguageModel, prepare_environment

_MODULES = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.model_executor.models.llama",
]


class _Process(context.ForkServerProcess):
    """With the environment of the process that starts it, as a fresh interpreter has it."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


@contextmanager
def models_in_forked_processes() -> Iterator[None]:
    """For every LanguageModel that is started in the block."""
    creating = LanguageModel._create
    processes = _Context()
    processes.set_forkserver_preload(_MODULES)
    forkserver.ensure_running()  # it imports while this process goes on
    with pytest.MonkeyPatch.context() as patch:

        def created(self: LanguageModel) -> Any:
            prepare_environment()
            from vllm.v1.engine import utils

            patch.setattr(utils, "get_mp_context", lambda: processes)
            return creating(self)

        patch.setattr(LanguageModel, "_create", created)
        yield
