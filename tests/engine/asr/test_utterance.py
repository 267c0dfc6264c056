import numpy as np

from omni_ws.engine.asr.utterance import Utterance, to_pcm16


def test_samples_over_full_scale_are_clipped() -> None:
    assert to_pcm16(np.array([-2.0, -1.0, 0.0, 1.0, 2.0], np.float32)).tolist() == [-32768, -32768, 0, 32767, 32767]


def test_an_utterance_grows_and_is_read_in_any_part() -> None:
    utterance = Utterance(8000)
    for start in (0, 3, 6):
        utterance.append(np.arange(start, start + 3, dtype=np.int16))
    assert (utterance.start_ms, utterance.length) == (500, 9)
    assert utterance.pcm().tolist() == list(range(9))
    utterance.append(np.array([9], np.int16))
    assert utterance.pcm(start=7).tolist() == [7, 8, 9]
    assert utterance.pcm(2, 4).tolist() == [2, 3]
