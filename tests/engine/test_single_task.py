"""What engines for the task speech refuse alike."""

from __future__ import annotations

import pytest
from support.engine_answers import AUDIO, BOTH, TEXT, open_input, request_of

from omni_ws.core.chunks import Task
from omni_ws.engine.first_to_start import check_is_heard
from omni_ws.errors import UnsupportedParameter


def test_speech_that_nobody_would_hear_is_refused() -> None:
    for modalities in (AUDIO, BOTH):
        check_is_heard(request_of(open_input(), task=Task.SPEECH, modalities=modalities))
    with pytest.raises(UnsupportedParameter, match="task speech answers with audio") as refused:
        check_is_heard(request_of(open_input(), task=Task.SPEECH, modalities=TEXT))
    assert refused.value.param == "modalities"
