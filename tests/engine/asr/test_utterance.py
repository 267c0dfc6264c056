import numpy as np

from omni_ws.engine.asr.recogniser import Utterance


def test_an_utterance_grows_and_is_read_in_any_part() -> None:
    utterance = Utterance(8000)
    for start in (0, 3, 6):
        utterance.append(np.arange(start, start + 3, dtype=np.int16))
    assert (utterance.start_ms, utterance.length) == (500, 9)
    assert utterance.pcm().tolist() == list(range(9))
    utterance.append(np.array([9], np.int16))
    assert utterance.pcm(start=7).tolist() == [7, 8, 9]
    assert utterance.pcm(2, 4).tolist() == [2, 3]
