"""Token2Wav of Qwen2.5-Omni in windows, against transformers' sound in one go."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="PyTorch is not installed (make test-vllm)")
pytest.importorskip("transformers", reason="transformers is not installed (make test-vllm)")

from support import vocoder_runs  # noqa: E402
from support.omni_reference import OmniReference, reference  # noqa: E402
from support.tiny_models import Family, omni_checkpoint  # noqa: E402
from support.vocoder_runs import Sound, difference, finish, joined  # noqa: E402

from omni_ws.config.values import ConfigurationError  # noqa: E402
from omni_ws.engine.omni.step_process import VocoderInput  # noqa: E402
from omni_ws.engine.omni.transformer import (  # noqa: E402
    default_speaker,
    load_speakers,
)
from omni_ws.engine.omni.vocoder import (  # noqa: E402
    MOST_WAITING,
    STREAMING,
    MelWindow,
    Qwen25Token2Wav,
    RungeKutta,
    StepGraphs,
    Token2WavNetwork,
    WindowPlan,
)
from omni_ws.errors import EngineOverloaded, InvalidValue  # noqa: E402

pytestmark = pytest.mark.vllm

#: A window of everything.
ONE_SHOT = WindowPlan(first=MOST_WAITING)
BLOCK = 12
#: Samples of a code.
CODE = 480
#: Not a whole number of blocks.
CODES = 65
SEED = 7
#: Of the peak.
EXACT = 1e-5

Codes = NDArray[np.int64]


@pytest.fixture(scope="module")
def network() -> Token2WavNetwork:
    return load()


@pytest.fixture(scope="module")
def quick() -> Token2WavNetwork:
    """Where the number of steps does not matter."""
    return load(ode_steps=3)


@pytest.fixture(scope="module")
def transformers() -> OmniReference:
    return reference(Family.QWEN25)


def load(ode_steps: int = 10, **changes: Any) -> Token2WavNetwork:
    model = reference(Family.QWEN25).model
    arguments = {
        "config": model.config.token2wav_config.to_dict(),
        "weights": model.token2wav.state_dict(),
        "speakers": load_speakers(omni_checkpoint(Family.QWEN25)),
        **changes,
    }
    return Token2WavNetwork(**arguments, ode_steps=ode_steps, device=torch.device("cpu"))


def random_codes(count: int = CODES, *, seed: int = 1) -> Codes:
    return np.random.default_rng(seed).integers(0, 80, (count, 1))


def pieces(codes: Codes, sizes: Iterable[int], *, end_apart: bool = False) -> list[VocoderInput]:
    """Cut codes; with ``end_apart`` the end comes after all of them."""
    items, at = [], 0
    for size in sizes:
        if at >= len(codes):
            break
        items.append(VocoderInput(codes[at : at + size], last=not end_apart and at + size >= len(codes)))
        at += size
    return [*items, VocoderInput(codes[:0], last=True)] if end_apart else items


def decode(model: Qwen25Token2Wav, items: Sequence[VocoderInput], session: int = 1, **settings: Any) -> list[Sound]:
    """Decode one answer, item by item, with the noise of ``SEED`` by default."""
    return vocoder_runs.decode(model, items, session, **{"seed": SEED, **settings})


@pytest.mark.parametrize(("speaker", "count"), [("Chelsie", 1), ("Ethan", CODES)])
def test_one_shot_is_transformers_own(
    network: Token2WavNetwork, transformers: OmniReference, speaker: str, count: int
) -> None:
    codes = random_codes(count)
    expected = transformers.token2wav(codes, network.noise(SEED, 0, 2 * count)[None], speaker=speaker)
    outputs = decode(Qwen25Token2Wav(network, plan=ONE_SHOT), pieces(codes, [count]), voice=speaker)
    assert 0.2 < np.abs(expected).max() < 1
    assert len(expected) == count * CODE
    assert difference(joined(outputs), expected) <= EXACT


def test_fewer_steps_are_those_of_transformers(transformers: OmniReference) -> None:
    network, codes = load(ode_steps=4), random_codes(30)
    noise = network.noise(SEED, 0, 60)[None]
    sound = joined(decode(Qwen25Token2Wav(network, plan=ONE_SHOT), pieces(codes, [30]), voice="Chelsie"))
    assert difference(sound, transformers.token2wav(codes, noise, speaker="Chelsie", num_steps=4)) <= EXACT
    assert difference(sound, transformers.token2wav(codes, noise, speaker="Chelsie")) > 100 * EXACT


def test_any_cuts_give_the_same_samples(quick: Token2WavNetwork) -> None:
    codes = random_codes()
    model = Qwen25Token2Wav(quick)
    expected = joined(decode(model, pieces(codes, [CODES])))
    assert len(expected) == CODES * CODE
    dice = random.Random(3)
    for attempt in range(3):
        sizes = (dice.choice((0, 1, 2, 5, 13, 24, 40)) for _ in itertools.count())
        outputs = decode(model, pieces(codes, sizes, end_apart=attempt % 2 == 1))
        assert np.array_equal(joined(outputs), expected)
        assert len(joined(outputs)) == CODES * CODE


def test_windows_are_near_one_shot(quick: Token2WavNetwork) -> None:
    """How near depends on the weights; the figures are in the decision."""
    codes = random_codes()
    whole = joined(decode(Qwen25Token2Wav(quick, plan=ONE_SHOT), pieces(codes, [CODES])))
    errors = [
        difference(joined(decode(Qwen25Token2Wav(quick, plan=plan), pieces(codes, [CODES]))), whole)
        for plan in (WindowPlan(past=0, future=0), STREAMING, WindowPlan(past=4, first=3, future=3))
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0


@pytest.mark.parametrize(("given", "frames"), [(23, 0), (24, 12), (59, 12), (60, 38), (95, 38), (96, 74)], ids=str)
def test_sound_comes_as_soon_as_a_window_is_there(quick: Token2WavNetwork, given: int, frames: int) -> None:
    """The first after 24 codes. What is held back, later, are ten codes on which the samples before them depend."""
    outputs = decode(Qwen25Token2Wav(quick), pieces(random_codes(100), [given])[:1])
    assert [len(samples) for samples in outputs] == [frames * CODE]


def test_each_input_has_its_output(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick)
    model.open(1, {})
    for item in pieces(random_codes(101), [24, 10, 40, 27]):
        model.feed(1, item)
    assert [len(samples) // CODE for samples in finish(model)[1]] == [12, 0, 26, 63]


@pytest.mark.parametrize("count", range(10))
def test_short_answers_are_whole(quick: Token2WavNetwork, count: int) -> None:
    """As short as half a block, and at the edges of windows."""
    length = (0, 6, 11, 12, 13, 24, 25, 47, 48, 49)[count]
    outputs = decode(Qwen25Token2Wav(quick), pieces(random_codes(length), [length], end_apart=True))
    assert len(joined(outputs)) == length * CODE


def test_a_batch_makes_what_sessions_make_alone(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick)
    answers = {session: (random_codes(30 + 13 * session, seed=session), session) for session in range(3)}
    alone = {
        session: joined(decode(model, pieces(codes, [len(codes)]), seed=seed, voice=("Chelsie", "Ethan")[session % 2]))
        for session, (codes, seed) in answers.items()
    }
    batches = counted_batches(model)
    for session, (codes, seed) in answers.items():
        model.open(session, {"seed": seed, "voice": ("chelsie", "ETHAN")[session % 2]})
        model.feed(session, VocoderInput(codes, last=True))
    together = {session: joined(outputs) for session, outputs in finish(model).items()}
    assert max(batches) == 3
    for session, sound in together.items():
        assert difference(sound, alone[session]) <= EXACT


def counted_batches(model: Qwen25Token2Wav) -> list[int]:
    """The sizes of the batches that the solver works on from now on."""
    sizes: list[int] = []
    decode = model._decode

    def counting(work: tuple[bool, int], answers: Sequence[Any]) -> None:
        if not work[0]:
            sizes.append(len(answers))
        decode(work, answers)

    model._decode = counting  # type: ignore[method-assign,assignment]
    return sizes


def test_a_batch_is_limited(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick, batch=2)
    batches = counted_batches(model)
    for session in range(3):
        model.open(session, {})
        model.feed(session, VocoderInput(random_codes(24), last=False))
    assert {session: len(outputs) for session, outputs in finish(model).items()} == {0: 1, 1: 1, 2: 1}
    assert max(batches) == 2


def test_sound_depends_on_seed_and_voice(network: Token2WavNetwork) -> None:
    model, items = Qwen25Token2Wav(network), pieces(random_codes(30), [30])
    plain = joined(decode(model, items))
    assert np.array_equal(joined(decode(model, items, voice="Chelsie")), plain)
    assert difference(joined(decode(model, items, seed=8)), plain) > 0.01
    assert difference(joined(decode(model, items, voice="Ethan")), plain) > 0.001


def test_a_closed_session_is_gone_at_once(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick, slots=2)
    codes = random_codes(48)
    expected = joined(decode(model, pieces(codes, [48])))
    for session in (1, 2):
        model.open(session, {"seed": SEED})
        model.feed(session, VocoderInput(codes, last=True))
    for _ in range(7):
        model.step()
    model.close(1)
    model.close(1)
    model.open(3, {})
    made = finish(model)
    assert made.keys() == {2}
    assert difference(joined(made[2]), expected) <= EXACT
    assert not model.busy


def test_sessions_that_close_anywhere_leave_nothing(quick: Token2WavNetwork) -> None:
    model, dice = Qwen25Token2Wav(quick, slots=4), random.Random(2)
    expected = joined(decode(model, pieces(random_codes(30), [30])))
    opened: list[int] = []
    for session in range(50):
        if len(opened) == model.slots:
            model.close(opened.pop(dice.randrange(len(opened))))
        model.open(session, {"seed": session})
        opened.append(session)
        model.feed(session, VocoderInput(random_codes(dice.choice((0, 5, 24, 30))), last=dice.random() < 0.3))
        for _ in range(dice.randrange(3)):
            model.step()
    for session in opened:
        model.close(session)
    assert not model.busy
    assert np.array_equal(joined(decode(model, pieces(random_codes(30), [30]))), expected)


def test_a_step_is_one_evaluation(network: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(network)
    model.open(1, {})
    model.feed(1, VocoderInput(random_codes(24), last=False))
    steps = [model.step() for _ in range(4 * 9 + 1)]
    assert [len(results) for results in steps] == [0] * 36 + [1]
    assert not model.busy


def test_the_solver_is_of_fourth_order() -> None:
    """The growth of y' = y from 1 is e; half the step, a sixteenth of the error."""

    def error(steps: int) -> float:
        solver = RungeKutta(torch.ones(1, dtype=torch.float64), [step / steps for step in range(steps + 1)])
        while not solver.done:
            solver.take(solver.point)
        return abs(float(solver.value) - math.e)

    assert error(2) / error(4) == pytest.approx(16, rel=0.2)
    assert error(32) < 1e-7


def test_slots_are_limited(network: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(network, slots=2)
    model.open(1, {})
    model.open(2, {})
    with pytest.raises(EngineOverloaded):
        model.open(3, {})
    model.close(1)
    model.open(3, {})
    assert model.slots == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"voice": "Nobody"}, "unknown voice 'Nobody'; the model has Chelsie, Ethan"),
        ({"voice": 3}, "unknown voice 3"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"speed": 2}, "unknown setting of the vocoder: speed"),
    ],
)
def test_settings_are_checked(network: Token2WavNetwork, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Qwen25Token2Wav(network).open(1, settings)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((3, 2), np.int64), "shape"),
        (np.zeros(3, np.int64), "shape"),
        (np.zeros((3, 1), np.float32), "integers"),
        (np.array([[82]]), "code 82 is not one of the 82"),
        (np.array([[-1]]), "code -1"),
        (np.zeros((MOST_WAITING + 1, 1), np.int64), f"more than {MOST_WAITING} codec frames wait"),
    ],
)
def test_codes_are_checked(network: Token2WavNetwork, codes: Any, message: str) -> None:
    model = Qwen25Token2Wav(network, slots=1)
    model.open(1, {})
    with pytest.raises(InvalidValue, match=message):
        model.feed(1, VocoderInput(codes))
    # Its slot is free again.
    model.open(2, {})


def test_codes_at_the_limits_are_taken(network: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(network)
    model.open(1, {})
    model.feed(1, VocoderInput(np.full((MOST_WAITING, 1), 81)))
    assert model.busy
    with pytest.raises(InvalidValue, match="wait"):
        model.feed(1, VocoderInput(np.zeros((1, 1), np.int64)))


def test_nothing_comes_after_the_end(network: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(network)
    model.open(1, {})
    model.feed(1, VocoderInput(random_codes(3), last=True))
    with pytest.raises(InvalidValue, match="after the last"):
        model.feed(1, VocoderInput(random_codes(3)))


def test_what_is_kept_does_not_grow_with_the_answer(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick)
    model.open(1, {})
    codes = random_codes(180)
    for item in pieces(codes, itertools.repeat(30))[:-1]:
        model.feed(1, item)
        finish(model)
        answer = model._streams[1]
        assert len(answer.codes) <= (STREAMING.past + STREAMING.chunk + STREAMING.future) * BLOCK + 30
        assert answer.mels is None or len(answer.mels) <= 40


def test_warming_up_leaves_nothing_behind(quick: Token2WavNetwork) -> None:
    model = Qwen25Token2Wav(quick, slots=1)
    model.warm_up()
    assert not model.busy
    model.open(1, {})
    assert model.memory_bytes == quick.memory_bytes > 100_000
    assert model.samples_per_frame == CODE


def test_what_graphs_read_and_write_is_as_without_them(
    quick: Token2WavNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of a graph is larger than that of the windows, and its buffers are longer."""
    quick.warm_up([48, 144], batch=4)
    times, mels = [0.1, 0.2, 0.3], [quick.noise(seed, 0, 48) for seed in range(3)]
    conditions = [quick.conditions("Ethan", torch.full((24,), code)) for code in range(3)]
    expected = quick.derivative(times, mels, conditions)
    runs: list[tuple[int, int]] = []
    run = StepGraphs.run

    def noting(graphs: StepGraphs, batch: int, frames: int) -> Any:
        runs.append((batch, frames))
        return run(graphs, batch, frames)

    monkeypatch.setattr(StepGraphs, "__contains__", lambda graphs, shape: True)
    monkeypatch.setattr(StepGraphs, "run", noting)
    found = quick.derivative(times, mels, conditions)
    quick.derivative(times, mels[::-1], conditions)
    assert runs == [(4, 48)] * 2
    assert found.shape == expected.shape == (3, 48, 80)
    assert float((found - expected).abs().max()) <= EXACT * float(expected.abs().max())


def test_windows_of_an_answer_lie_side_by_side() -> None:
    for plan, blocks in itertools.product((STREAMING, WindowPlan(past=0, first=3, chunk=2, future=0)), range(1, 12)):
        windows = [MelWindow.of(plan, index, block=BLOCK, total=blocks * BLOCK) for index in range(plan.count(blocks))]
        assert [window.begin for window in windows] == [0, *(window.end for window in windows[:-1])]
        assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
        assert windows[-1].end == windows[-1].right == blocks * BLOCK
        for index in range(plan.unlocked(blocks)):
            # Known or not, the end of the answer changes nothing.
            assert MelWindow.of(plan, index, block=BLOCK, total=None).right == windows[index].right
    assert STREAMING.count(0) == 0


def test_speakers_are_read_from_their_file() -> None:
    speakers = load_speakers(omni_checkpoint(Family.QWEN25))
    assert [*speakers] == ["Chelsie", "Ethan"]
    assert speakers["Ethan"].reference_mel.shape == (1, 75, 80)
    assert default_speaker(speakers) == "Chelsie"
    assert default_speaker(["Ada", "Bob"]) == "Ada"


def test_constants_of_released_checkpoints_are_passed_over(transformers: OmniReference) -> None:
    """So are names that configurations of other versions of transformers have."""
    weights = transformers.model.token2wav.state_dict()
    config = transformers.model.config.token2wav_config.to_dict()
    for part in ("dit_config", "bigvgan_config"):
        config[part] |= {"_attn_implementation_autoset": True, "torch_dtype": "float32", "use_bias_at_final": False}
    load(weights={**weights, "code2wav_dit_model.rotary_embed.inv_freq": torch.zeros(16)}, config=config, ode_steps=2)


class Trap:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "cannot be read"),
        (b"junk", "cannot be read"),
        ({"Ada": Trap()}, "cannot be read"),
        ({}, "no speakers"),
        ([1], "no speakers"),
        ({"Ada": {"bos_token": 1}}, "Ada: bos_token, cond and ref_mel are needed"),
        ({"Ada": {"bos_token": 1, "cond": torch.zeros(3), "ref_mel": torch.zeros(1, 4, 80)}}, "must be"),
    ],
    ids=["missing", "empty", "junk", "code", "none", "list", "incomplete", "shape"],
)
def test_files_of_speakers_that_are_none_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "spk_dict.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "spk_dict.pt")
    with pytest.raises(ConfigurationError, match=message):
        load_speakers(tmp_path)


def test_weights_and_speakers_must_fit(transformers: OmniReference) -> None:
    weights = dict(transformers.model.token2wav.state_dict())
    del weights["code2wav_bigvgan_model.conv_pre.weight"]
    with pytest.raises(ConfigurationError, match=r"no tensor code2wav_bigvgan_model\.conv_pre\.weight"):
        load(weights=weights)
    weights["code2wav_bigvgan_model.conv_pre.weight"] = torch.zeros(3)
    with pytest.raises(ConfigurationError, match="size mismatch"):
        load(weights=weights)
    (speaker, *_) = load_speakers(omni_checkpoint(Family.QWEN25)).values()
    changed = type(speaker)(speaker.bos_token, torch.zeros(1, 3), speaker.reference_mel)
    with pytest.raises(ConfigurationError, match="16 values and 80 mel bins"):
        load(speakers={"Ada": changed})
    with pytest.raises(ConfigurationError, match="ode_steps"):
        load(ode_steps=1)
