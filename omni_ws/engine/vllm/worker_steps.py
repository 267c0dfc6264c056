"""StepWatch: which rows of a step of vLLM's model runner belong to the requests that ask for something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AskedRows:
    """The ``count`` rows of a step that belong to a request: from ``first_row``, at the positions from ``begins``."""

    #: What the request asks for.
    asked: Any
    #: Its place in the runner's batch.
    index: int
    first_row: int
    begins: int
    count: int


class StepWatch:
    """Watches the steps of ``runner``. Requests ask by ``name`` in the ``extra_args`` of their sampling parameters.

    A request that does not ask costs one look-up.
    """

    def __init__(self, runner: Any, name: str) -> None:
        self._runner = runner
        self._name = name
        self._scheduled: Any = None
        execute = runner.execute_model

        def execute_model(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._scheduled = scheduled
            return execute(scheduled, *arguments, **options)

        runner.execute_model = execute_model

    def asked(self) -> Iterator[AskedRows]:
        """Yield the rows of the step that is about to run; to be called once, where the model's forward is called.

        Only there, after input preparation, are the rows in the order in which the model gets them. A forward outside
        a step, as when the runner warms up, has none.
        """
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        batch, row = self._runner.input_batch, 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            sampling = self._runner.requests[request_id].sampling_params
            asked = ((sampling and sampling.extra_args) or {}).get(self._name)
            if asked is not None:
                yield AskedRows(asked, index, row, int(batch.num_computed_tokens_cpu[index]), count)
            row += count
