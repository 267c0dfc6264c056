"""Cost of a session that waits for more input: CPU time of the processes of engine and server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from support.engine_answers import Input
from support.tiny_models import ENGINE_ARGS, build_text_model
from support.vllm_engine import answer, core_process, running_engine, unfinished

from benchmarks.server_process import cpu_seconds
from benchmarks.vllm_parts.report import Report, Size
from omni_ws.engine.vllm.engine import VllmEngine

MOST_OF_A_CORE: Final = 0.02
SESSIONS: Final = 4


async def measure(report: Report, size: Size, models: Path) -> None:
    report.table(
        f"Sessions that wait for input, for {size.seconds:g} s",
        "open sessions",
        "% of a core: engine",
        "server",
        "both",
    )
    async with running_engine(build_text_model(models / "text"), ENGINE_ARGS) as engine:
        idle = await _share_of_a_core(engine, size.seconds)
        report.row("0", *_percent(idle))
        for sessions in (1, SESSIONS):
            waiting = [Input("Hello, this is how it begins ", open_end=True) for _ in range(sessions)]
            answers = [asyncio.create_task(answer(engine, source)) for source in waiting]
            await asyncio.sleep(1)
            if unfinished(engine) != sessions:
                raise RuntimeError("the sessions hold no place in the engine")
            shares = await _share_of_a_core(engine, size.seconds)
            for source in waiting:
                source.close()
            await asyncio.gather(*answers)
            each = max(0.0, sum(shares) - sum(idle)) / sessions
            figures = _percent(shares)
            target = f"{figures[2]}: {each * 100:.1f} a session; ≤ {MOST_OF_A_CORE * 100:g}"
            report.row(str(sessions), *figures[:2], target, met=each <= MOST_OF_A_CORE)


async def _share_of_a_core(engine: VllmEngine, seconds: float) -> tuple[float, float]:
    """CPU seconds of the engine's process, and of this one."""
    processes = (core_process(engine), os.getpid())
    before = [cpu_seconds(process) for process in processes]
    await asyncio.sleep(seconds)
    model, server = ((cpu_seconds(one) - then) / seconds for one, then in zip(processes, before, strict=True))
    return model, server


def _percent(shares: tuple[float, float]) -> tuple[str, str, str]:
    model, server = shares
    return f"{model * 100:.1f}", f"{server * 100:.1f}", f"{(model + server) * 100:.1f}"
