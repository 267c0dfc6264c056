"""Code2Wav of Qwen3-Omni in pieces, against transformers' decoding in one go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.vocoder_runs import Sound, decode, difference, finish, joined

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.step_process import VocoderInput
from omni_ws.errors import EngineOverloaded, InvalidValue

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape, Qwen3Code2Wav


CONFIG: dict[str, Any] = {
    "codebook_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "decoder_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def small_module(seed: int = 0, **changes: Any) -> Qwen3OmniMoeCode2Wav:
    """Return transformers' module with small random weights that make an audible sound without saturating."""
    import torch
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    torch.manual_seed(seed)
    module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**(CONFIG | changes))).eval()
    with torch.inference_mode():
        for name, weight in module.named_parameters():
            _draw(name, weight)
        codes = torch.randint(0, module.config.codebook_size, (1, module.config.num_quantizers, 20))
        module.decoder[-1].conv.weight.mul_(0.4 / float(module(codes).abs().max()))
    return module


def _draw(name: str, weight: Any) -> None:
    if weight.ndim == 3:
        # Residual branches are small, lest every error grow to the peak.
        gain = 0.25 if ".conv2." in name or "dwconv" in name else 0.7
        fan_in = weight.shape[0] * 2 if "block.1." in name else weight.shape[1] * weight.shape[2]
        weight.normal_(0, gain * fan_in**-0.5)
    elif weight.ndim == 2:
        weight.normal_(0, weight.shape[1] ** -0.5)
    elif name.endswith("gamma") or "scale" in name:
        weight.fill_(0.3)
    elif "alpha" in name or "beta" in name or name.endswith("bias"):
        weight.normal_(0, 0.1)


def shape(**changes: Any) -> Code2WavShape:
    """Return the shape of ``small_module``."""
    from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape

    return Code2WavShape.read(CONFIG | changes)


pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("transformers")

FRAMES = 700
TAIL = 555

Codes = NDArray[np.int64]


@pytest.fixture(scope="module")
def module() -> Any:
    return small_module()


@pytest.fixture
def model(module: Any) -> Qwen3Code2Wav:
    return load(module)


@pytest.fixture(scope="module")
def codes() -> Codes:
    return random_codes(FRAMES, seed=1)


@pytest.fixture(scope="module")
def whole(module: Any, codes: Codes) -> Sound:
    return one_shot(module, codes)


def load(module: Any, **options: Any) -> Qwen3Code2Wav:
    from omni_ws.engine.omni.qwen3_code2wav import Qwen3Code2Wav

    return Qwen3Code2Wav(shape(), dict(module.state_dict()), **options)


def random_codes(frames: int, *, seed: int) -> Codes:
    return np.random.default_rng(seed).integers(0, CONFIG["codebook_size"], (frames, 16))


def one_shot(module: Any, codes: Codes) -> Sound:
    import torch

    with torch.inference_mode():
        sound: Sound = module(torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    return sound


def pieces(codes: Codes, sizes: Iterable[int]) -> list[VocoderInput]:
    """Cut codes; the last size is repeated."""
    items, at, size = [], 0, 1
    remaining = iter(sizes)
    while at < len(codes):
        size = next(remaining, size)
        items.append(VocoderInput(codes[at : at + size], last=at + size >= len(codes)))
        at += size
    return items


def test_the_sound_to_compare_with_is_one(whole: Sound) -> None:
    assert len(whole) == FRAMES * 1920 - TAIL
    assert 0.2 < np.abs(whole).max() < 1.0
    assert np.sqrt(np.square(whole).mean()) > 0.02


@pytest.mark.parametrize("sizes", [[1], [4, 4, 8, 16, 25], [FRAMES], "random"], ids=str)
def test_any_cuts_give_the_sound_of_one_shot(
    model: Qwen3Code2Wav, codes: Codes, whole: Sound, sizes: list[int] | str
) -> None:
    dice = random.Random(5)
    cut = (dice.choice((0, 1, 2, 3, 7, 20, 60)) for _ in itertools.count()) if isinstance(sizes, str) else sizes
    outputs = decode(model, pieces(codes, cut))
    assert difference(joined(outputs), whole) <= 1e-5


def test_what_was_sent_is_all_that_the_frames_settle(model: Qwen3Code2Wav, codes: Codes) -> None:
    done = 0
    sent = 0
    for item, output in zip(items := pieces(codes[:40], [1, 1, 3, 12]), decode(model, items), strict=True):
        done += len(item.codes)
        sent += len(output)
        assert sent == done * 1920 - TAIL


def test_samples_do_not_depend_on_later_frames(model: Qwen3Code2Wav, codes: Codes) -> None:
    other = codes.copy()
    other[100:] = random_codes(FRAMES - 100, seed=9)
    settled = 100 * 1920 - TAIL
    one, two = (joined(decode(model, pieces(some[:140], [20]))) for some in (codes, other))
    assert np.array_equal(one[:settled], two[:settled])
    assert difference(one[settled:], two[settled:]) > 0.01


def test_a_batch_of_different_lengths_is_equal_to_single_sessions(module: Any) -> None:
    answers = {session: random_codes(30 + 17 * session, seed=session) for session in range(8)}
    cuts = {session: pieces(answer, [1, 2, 5 + session, 9]) for session, answer in answers.items()}
    model = load(module, slots=8)
    # They begin one after another, so that each is at another place.
    made: dict[int, list[Sound]] = {session: [] for session in answers}
    rounds = max(len(items) for items in cuts.values()) + len(cuts)
    for number in range(rounds):
        for session, items in cuts.items():
            if number == session:
                model.open(session, {})
            if 0 <= number - session < len(items):
                model.feed(session, items[number - session])
        for session, outputs in finish(model).items():
            made[session] += outputs
    for session, answer in answers.items():
        alone = joined(decode(load(module), cuts[session]))
        assert np.abs(joined(made[session]) - alone).max() <= 1e-6
        assert difference(alone, one_shot(module, answer)) <= 1e-5


def test_sessions_with_the_same_piece_share_a_step(module: Any, codes: Codes) -> None:
    model = load(module, slots=6, batch=4)
    for session in range(6):
        model.open(session, {})
        model.feed(session, VocoderInput(codes[:1]))
    assert [session for session, _ in model.step()] == [0, 1, 2, 3]
    assert [session for session, _ in model.step()] == [4, 5]
    assert not model.busy
    for session in range(6):
        model.feed(session, VocoderInput(codes[1:5] if session % 2 else codes[1:3]))
    assert [session for session, _ in model.step()] == [0, 2, 4]
    assert [session for session, _ in model.step()] == [1, 3, 5]


def test_a_step_decodes_no_more_than_so_many_frames(module: Any, codes: Codes) -> None:
    from omni_ws.engine.omni.qwen3_code2wav import STEP_FRAMES

    model = load(module, slots=6)
    for session in range(6):
        model.open(session, {})
        model.feed(session, VocoderInput(codes[:33]))
    model.step()
    # Pieces of 32 frames: four of them, and the other two in the step after.
    assert STEP_FRAMES == 4 * 32
    assert [session for session, _ in model.step()] == [0, 1, 2, 3]
    assert [session for session, _ in model.step()] == [4, 5]


def test_sessions_closed_anywhere_leave_all_slots(module: Any, codes: Codes, whole: Sound) -> None:
    dice = random.Random(7)
    model = load(module, slots=4)
    alive: list[int] = []
    for session in range(60):
        model.open(session, {})
        alive.append(session)
        for other in alive:
            model.feed(other, VocoderInput(codes[: dice.choice((0, 1, 3, 8))]))
        for _ in range(dice.randrange(3)):
            model.step()
        if len(alive) == 4 or dice.random() < 0.5:
            model.close(alive.pop(dice.randrange(len(alive))))
    for session in alive:
        model.close(session)
    assert not model.busy
    for session in range(200, 204):
        model.open(session, {})
        model.feed(session, VocoderInput(codes[:40]))
    outputs = finish(model)
    assert sorted(outputs) == [200, 201, 202, 203]
    for made in outputs.values():
        assert difference(joined(made), whole[: 40 * 1920 - TAIL]) <= 1e-5


def test_a_long_backlog_holds_nobody_up(model: Qwen3Code2Wav, codes: Codes) -> None:
    model.open(1, {})
    model.open(2, {})
    model.feed(1, VocoderInput(codes[:600]))
    model.step()
    model.feed(2, VocoderInput(codes[:1]))
    steps = 1
    while not (results := model.step()):
        steps += 1
    # At most one piece of the other session is in between.
    assert [session for session, _ in results] == [2]
    assert steps <= 2
    model.close(1)
    assert not model.busy


def test_several_inputs_at_once_come_back_in_order(model: Qwen3Code2Wav, codes: Codes, whole: Sound) -> None:
    items = [
        VocoderInput(codes[:0]),
        VocoderInput(codes[:7]),
        VocoderInput(codes[7:7]),
        VocoderInput(codes[7:7]),
        VocoderInput(codes[7:40]),
        VocoderInput(codes[40:40], last=True),
    ]
    model.open(1, {})
    for item in items:
        model.feed(1, item)
    outputs = finish(model)[1]
    assert [len(samples) for samples in outputs] == [0, 7 * 1920 - TAIL, 0, 0, 33 * 1920, 0]
    assert difference(joined(outputs), whole[: 40 * 1920 - TAIL]) <= 1e-5


def test_closing_frees_the_slot_at_once_and_leaves_nothing_behind(module: Any, codes: Codes, whole: Sound) -> None:
    model = load(module, slots=1)
    model.open(1, {})
    model.feed(1, VocoderInput(codes[200:300]))
    model.step()
    with pytest.raises(EngineOverloaded):
        model.open(2, {})
    model.close(1)
    model.close(1)
    assert not model.busy
    assert difference(joined(decode(model, pieces(codes[:90], [30]), session=2)), whole[: 90 * 1920 - TAIL]) <= 1e-5


def test_closing_one_of_a_batch_leaves_the_others_alone(module: Any, codes: Codes, whole: Sound) -> None:
    model = load(module, slots=3)
    for session in range(3):
        model.open(session, {})
        model.feed(session, VocoderInput(codes[:100]))
    made = [result for _ in range(3) for result in model.step()]
    model.close(1)
    outputs = finish(model)
    assert made == []
    assert sorted(outputs) == [0, 2]
    for session in (0, 2):
        assert difference(joined(outputs[session]), whole[: 100 * 1920 - TAIL]) <= 1e-5


def test_rows_that_only_fill_a_batch_change_nothing(module: Any, codes: Codes, whole: Sound) -> None:
    """As a CUDA graph has them: rows of the scratch slot, several in a batch."""
    import torch

    from omni_ws.engine.omni.qwen3_code2wav import Code2WavNetwork, SlotMemory

    memory = SlotMemory(2, torch.device("cpu"))
    network = Code2WavNetwork(shape(), dict(module.state_dict()), memory)
    rows = torch.tensor([2, 1, 2, 2])
    made = []
    for begin, end in ((0, 1), (1, 9), (9, 40)):
        batch = torch.zeros((4, 16, end - begin), dtype=torch.int64)
        batch[1] = torch.from_numpy(codes[begin:end].T.copy())
        made.append(network(batch, rows, torch.tensor([0, begin, 0, 0]), first=not begin)[1].numpy())
    assert difference(np.concatenate(made), whole[: 40 * 1920 - TAIL]) <= 1e-5


def test_decoding_does_not_wait_for_the_device(module: Any) -> None:
    """Otherwise a graph could not hold it."""
    import torch
    from support.omni_reference import NothingWaits

    from omni_ws.engine.omni.qwen3_code2wav import Code2WavNetwork, SlotMemory

    memory = SlotMemory(2, torch.device("cpu"))
    network = Code2WavNetwork(shape(), dict(module.state_dict()), memory)
    rows, done = torch.tensor([0, 1]), torch.tensor([0, 0])
    with NothingWaits():
        for frames, first in ((1, True), (4, False)):
            network(torch.zeros((2, 16, frames), dtype=torch.int64), rows, done, first=first)


def test_graphs_of_a_gpu_give_the_sound_of_the_cpu(module: Any, codes: Codes, whole: Sound) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    model = load(module, slots=3, device="cuda")
    model.warm_up()
    for session in range(3):
        model.open(session, {})
        model.feed(session, VocoderInput(codes[: 100 + session]))
    for session, outputs in finish(model).items():
        assert difference(joined(outputs), whole[: (100 + session) * 1920 - TAIL]) <= 1e-5
    assert model.memory_bytes > 0


def test_warming_up_changes_nothing(model: Qwen3Code2Wav, codes: Codes, whole: Sound) -> None:
    model.warm_up()
    assert difference(joined(decode(model, pieces(codes[:50], [8]))), whole[: 50 * 1920 - TAIL]) <= 1e-5


def test_that_of_a_checkpoint_is_loaded() -> None:
    from support.omni_reference import reference
    from support.tiny_models import Family, omni_checkpoint

    from omni_ws.engine.omni import slot_talker

    model, facts = slot_talker.vocoder(str(omni_checkpoint(Family.QWEN3)), 2)
    assert (facts["sample_rate"], facts["frame_ms"], facts["block"]) == (24_000, 80.0, None)
    codes = random_codes(50, seed=4)
    whole = one_shot(reference(Family.QWEN3).model.code2wav, codes)
    assert difference(joined(decode(model, pieces(codes, [1, 2, 4, 8]))), whole) <= 1e-5


def test_memory_is_what_weights_and_slots_take(module: Any) -> None:
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    few, many = load(module, slots=1).memory_bytes, load(module, slots=9).memory_bytes
    a_slot = (many - few) / 8
    # Keys and values of 71 positions in 4 layers are 73 KB of it.
    assert 73_000 < a_slot < 120_000
    assert few == weights + 2 * a_slot


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (np.full((2, 16), 64), "code 64 is not one of the 64"),
        (np.full((2, 16), -1), "code -1 is not one of the 64"),
        (np.zeros((2, 15), np.int64), "shape"),
        (np.zeros(16, np.int64), "shape"),
        (np.zeros((2, 16), np.float32), "integers"),
    ],
)
def test_codes_that_cannot_be_decoded_end_the_session(
    module: Any, codes: Codes, wrong: NDArray[Any], said: str
) -> None:
    model = load(module, slots=1)
    model.open(1, {})
    model.feed(1, VocoderInput(np.full((3, 16), 63)))
    with pytest.raises(InvalidValue, match=said):
        model.feed(1, VocoderInput(wrong))
    assert not model.busy
    assert len(decode(model, pieces(codes[:3], [3]), session=2)) == 1


def test_codes_after_the_last_are_refused(model: Qwen3Code2Wav, codes: Codes) -> None:
    model.open(1, {})
    model.feed(1, VocoderInput(codes[:2], last=True))
    with pytest.raises(InvalidValue, match="after the last"):
        model.feed(1, VocoderInput(codes[:2]))


def test_waiting_frames_are_limited(model: Qwen3Code2Wav) -> None:
    from omni_ws.engine.omni.qwen3_code2wav import MOST_WAITING

    model.open(1, {})
    model.feed(1, VocoderInput(random_codes(MOST_WAITING - 1, seed=0)))
    model.feed(1, VocoderInput(random_codes(1, seed=0)))
    with pytest.raises(InvalidValue, match="1024 codec frames"):
        model.feed(1, VocoderInput(random_codes(1, seed=0)))


def test_settings_are_refused_by_name(model: Qwen3Code2Wav) -> None:
    with pytest.raises(InvalidValue, match="steps"):
        model.open(1, {"steps": 4})
    model.open(1, {"voice": "Ethan", "seed": 7})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"upsampling_ratios": [1, 1]}, "makes no sound"),
    ],
)
def test_shapes_that_are_not_supported_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        shape(**change)


def test_weights_that_do_not_fit_are_refused(module: Any) -> None:
    from omni_ws.engine.omni.qwen3_code2wav import Qwen3Code2Wav

    weights = dict(module.state_dict())
    missing = {name: tensor for name, tensor in weights.items() if name != "decoder.6.conv.bias"}
    with pytest.raises(ConfigurationError, match=r"no tensor decoder\.6\.conv\.bias"):
        Qwen3Code2Wav(shape(), missing)
    with pytest.raises(ConfigurationError, match="1024 embeddings of codes where the configuration has 1040"):
        Qwen3Code2Wav(shape(codebook_size=65), weights)
    with pytest.raises(ConfigurationError, match="kernel of 10 with a stride of 4"):
        Qwen3Code2Wav(shape(upsample_rates=[8, 4, 4, 3]), weights)


def test_older_configurations_name_the_rotation_otherwise(module: Any, codes: Codes) -> None:
    from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape

    older = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
    assert Code2WavShape.read(older | {"rope_theta": 10_000.0, "rope_scaling": None}) == shape()
