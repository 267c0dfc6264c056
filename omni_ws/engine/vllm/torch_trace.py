"""TorchTrace: traces of torch operations in the processes of models, started and stopped at run time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omni_ws.engine.incident import incident
from omni_ws.engine.omni.step_process import StepProcess
from omni_ws.engine.vllm.language_model import LanguageModel

#: The folder below the root of all profiles to which vLLM writes. It is fixed when vLLM starts, so traces are moved
#: from there to their destination.
_FOLDER: Final = ".torch"
_SETTING: Final = "profiler_config"


def traced_arguments(args: Mapping[str, Any], root: Path | None, role: str) -> dict[str, Any]:
    """Return vLLM's arguments with those that enable tracing, unless the operator set them."""
    if root is None or _SETTING in args:
        return dict(args)
    setting = {
        "profiler": "torch",
        "torch_profiler_dir": str(_folder(root, role)),
        # The front end is this server's process, all of which would be traced, and slowed down.
        "ignore_frontend": True,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
    }
    return {**args, _SETTING: setting}


class TorchTrace:
    """One trace at a time, of all ``models``, which were started with ``traced_arguments``, and of ``processes``."""

    def __init__(
        self,
        root: Path | None,
        models: Sequence[tuple[LanguageModel, Mapping[str, Any]]],
        processes: Callable[[], Sequence[StepProcess]] = tuple,
    ) -> None:
        self._root = root
        self._processes = processes
        self._models = [model for model, _ in models]
        self._set_by_operator = any(_SETTING in args for _, args in models)
        self._name = ""
        self._template = Path()
        self._tracing: list[LanguageModel | StepProcess] = []

    @property
    def possible(self) -> bool:
        """Whether ``profiler.root`` is set, and the operator did not set ``vllm.args.profiler_config``."""
        return self._root is not None and not self._set_by_operator

    async def start(self, template: Path) -> None:
        """Start tracing. Raises EngineFailed."""
        self._name, self._template = uuid.uuid4().hex, template
        model: LanguageModel | StepProcess
        try:
            for model in self._models:
                await model.llm.start_profile(self._name)
                self._tracing.append(model)
            for model in self._processes():
                await model.trace(await asyncio.to_thread(self._file, model.role))
                self._tracing.append(model)
        except Exception as error:
            await self.stop()
            raise incident(f"tracing the {model.role} failed", error) from error

    async def stop(self) -> tuple[Path, ...]:
        """Stop tracing and return the files; takes seconds.

        Raises EngineFailed, after keeping the traces that were written.
        """
        tracing, self._tracing = self._tracing, []
        outcomes = await asyncio.gather(*(_stopped(model) for model in tracing), return_exceptions=True)
        try:
            files = await asyncio.to_thread(self._move, [model.role for model in tracing])
        except OSError as error:
            raise incident("moving the traces failed", error) from error
        for model, outcome in zip(tracing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise incident(f"writing the trace of the {model.role} failed", outcome) from outcome
        return files

    def _file(self, role: str) -> Path:
        """Return where a process writes its trace; named as vLLM names its own."""
        assert self._root is not None
        folder = _folder(self._root, role)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self._name}_rank0.pt.trace.json.gz"

    def _move(self, roles: Sequence[str]) -> tuple[Path, ...]:
        """Move the traces to their destination and return their paths."""
        assert self._root is not None
        found: list[Path] = []
        self._template.parent.mkdir(parents=True, exist_ok=True)
        for role in roles:
            for path in sorted(_folder(self._root, role).glob(f"{self._name}_*")):
                name = f"{self._template.name}_{role.lower()}_{path.name.removeprefix(f'{self._name}_')}"
                found.append(path.rename(self._template.with_name(name)))
        return tuple(found)


async def _stopped(model: LanguageModel | StepProcess) -> None:
    """End the trace of a model, and write it."""
    if isinstance(model, StepProcess):
        await model.trace(None)
    else:
        await model.llm.stop_profile()


def _folder(root: Path, role: str) -> Path:
    return root.expanduser().resolve() / _FOLDER / role.lower()
