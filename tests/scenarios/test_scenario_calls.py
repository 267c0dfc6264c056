"""Calls of scenarios over real sockets: each expectation with an answer that meets it, and one that does not."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from support.inline_workers import InlineWorkers, loud
from support.live_server import live_server
from support.realtime_client import openai_names
from support.scripted_engines import HearingEngine, said, takes, tool_call
from websockets.asyncio.server import ServerConnection, serve

from omni_ws.audio.pcm import Samples
from omni_ws.caller.answers import decoded
from omni_ws.caller.script import Target
from omni_ws.client.audio import Pcm16, write_wav
from omni_ws.core.chunks import FinishReason, Hearing, Modality, Usage
from omni_ws.engine.base import AudioOutput, Finished, TranscriptOutput
from omni_ws.errors import EngineFailed
from omni_ws.scenarios.call import CallTools, ChatModel
from omni_ws.scenarios.command import RunOptions, ScenarioResult, run_all
from omni_ws.scenarios.form import ScenarioFile, ScenarioUnusable, parse
from omni_ws.scenarios.speech import CallersSpeech, CallersVoice, Ears, recording
from omni_ws.wire.recording import ReceivedLine

RATE = 24_000
#: Four seconds of sound.
LONG = [*(AudioOutput(np.full(RATE // 10, 0.1, np.float32), RATE) for _ in range(40))]
SHORT = LONG[:5]
DONE = Finished(FinishReason.STOP, Usage())
STORY = [said("Once upon a time there was a lighthouse."), *LONG, DONE]
#: A picture of one pixel.
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class WrittenDown(Ears):
    """A recogniser that hears what the test says."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.heard: list[float] = []
        self._said = words

    async def words(self, samples: Any) -> str:
        self.heard.append(len(samples) / 16_000)
        return self._said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a recording that the detector takes for speech of 0.4 s."""
    write_wav(tmp_path / "said.wav", Pcm16(loud(416), 16_000))
    return tmp_path


#: The recording is no word by its sound, so an answer would go on under it.
CUTS = "  session: {turn_detection: {duck: false}}\n"


def file_of(folder: Path, steps: str, more: str = "") -> ScenarioFile:
    """A file with one scenario; its first step is on line 5."""
    head = "session: {turn_detection: {type: server_vad}}\nscenarios:\n- name: one\n  caller:\n"
    lines = "".join(f"  - {line.strip()}\n" for line in steps.strip().splitlines())
    return parse(f"{head}{lines}{more}".encode(), folder / "calls.yaml")


async def results(engine: HearingEngine, file: ScenarioFile, **how: Any) -> ScenarioResult:
    (found,) = await all_results(engine, file, **how)
    return found


async def all_results(
    engine: HearingEngine, file: ScenarioFile, *, ears: Ears | None = None, judge: ChatModel | None = None, **how: Any
) -> list[ScenarioResult]:
    times = how.pop("times", True)
    ears = ears or WrittenDown("")
    speech, player = how.pop("speech", None) or CallersSpeech(), how.pop("player", None)
    tools = CallTools(speech=speech, ears=ears, judge=judge, times=times, patience_ms=5000)

    async with live_server(engine, expect_errors=True, streaming_input={"resume_grace_sec": 20}) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        options = RunOptions(tools=tools, voice=CallersVoice("hibari"), model_of={"model": player}.__getitem__, **how)
        work = [(file, one) for one in file.scenarios]
        found = [one async for one in run_all(work, Target.parse(f"ws://127.0.0.1:{server.port}"), options)]
    ears.close()
    return found


def engine_that(*answer: Any, heard: Sequence[Any] | None = None, **changes: Any) -> HearingEngine:
    return HearingEngine(answer, heard=answer if heard is None else heard, tools=True, **changes)


PARIS = (said("The capital of France is Paris."), *SHORT, DONE)
HEARD = (TranscriptOutput("What is the capital?"), *PARIS)


class Knows(HearingEngine):
    """Answers what is typed by what it knows, and speech by ``HEARD``."""

    def __init__(self) -> None:
        super().__init__((), heard=HEARD)
        self._known: dict[str, Sequence[Any]] = {
            "paris": PARIS,
            "five": (said("It is five."), DONE),
            "late": (takes(1), *PARIS),
            "broken": (EngineFailed("broken"),),
            "count": (said("one two three"), *SHORT, DONE),
        }

    def steps(self, request: Any, taken: list[Any]) -> Any:
        typed = b"".join(chunk.payload for chunk in taken if chunk.modality is Modality.TEXT).decode()
        return self._known[typed] if typed else self.heard


#: Steps, and the problem that is told, with its line after that of the scenario's name; None: it passes.
EXPECTED: dict[str, str | None] = {
    "type: paris; hear: {said: paris}": None,
    "type: paris; hear: {said: Berlin}": "3: said 'The capital of France is Paris.', without 'Berlin'",
    "type: paris; hear: {said: /par.s/}": None,
    "type: paris; hear: {said: /^paris/}": r"3: said 'The .*', without '/\^paris/'",
    "type: paris; hear: {not_said: Berlin}": None,
    "type: paris; hear: {not_said: [Berlin, Paris]}": "3: said 'The .*', with 'Paris'",
    "type: five; hear: {said: '5'}": None,
    "sound: said.wav; hear: {said: Berlin}": r"3: said 'The .*', without 'Berlin'; heard 'What is the capital\?'$",
    "type: paris; hear: {said: Rome}": r"3: said 'The .*', without 'Rome'$",
    "sound: said.wav; hear: {heard: what is the capital}": None,
    "sound: said.wav; hear: {heard: {text: what was the capital, wrong: 0.25}}": None,
    "sound: said.wav; hear: {heard: what was the capital}": r"3: heard 'What is the capital\?', which has 25% of the",
    "type: paris; hear: {within_ms: 500}": None,
    "type: late; hear: {within_ms: 500}": r"3: the answer came after 1\d+ ms, not within 500",
    "type: paris; hear: {cut: false}": None,
    "type: paris; hear: {cut: true}": "3: the answer was not cut: 'The capital",
    "pause: 1; hear: {none: 2}": None,
    "type: paris; hear: {none: 2}": "3: something was said within 2 s: 'The capital",
    "pause: 1; hear: {said: Paris}": "3: no answer for 5 s",
    "type: broken; hear: {error: engine_failed}": None,
    "type: broken; hear: {error: rate_limited}": "3: the error engine_failed instead of rate_limited",
    "type: paris; hear: {error: engine_failed}": "3: no error engine_failed for 5 s",
    "type: broken; hear: {said: Paris}": "3: the error engine_failed",
    "type: broken; pause: 1": "0: the error engine_failed",
    "type: count; hear: {words_spoken_match: 0}": None,
    "type: paris; hear: {words_spoken_match: 0}": "3: the sound of 'The capital of France is Paris.' has .* wrong",
    "type: paris; hear: {}; hang_up; hear: {said: nothing}": None,
    "type: paris; interrupt: {sound: said.wav, after_ms: 5000}": "3: the answer was over after 500 ms, before it could",
}


@pytest.mark.virtual_clock
@pytest.mark.parametrize("protocol", ["native", "realtime"])
async def test_each_expectation_is_met_or_told_with_its_line(folder: Path, protocol: str) -> None:
    """All side by side, a call each."""
    text = f"protocol: {protocol}\nsession: {{turn_detection: {{type: server_vad}}}}\nscenarios:\n"
    lines: dict[str, int] = {}
    for number, steps in enumerate(EXPECTED):
        lines[f"number {number}"] = text.count("\n") + 1
        text += f"- name: number {number}\n  caller:\n"
        text += "".join(f"  - {step.strip()}\n" for step in steps.split(";"))
    file = parse(text.encode(), folder / "calls.yaml")
    found = await all_results(Knows(), file, ears=WrittenDown("one two three"), jobs=len(EXPECTED))
    astray = {}
    for result, (steps, problem) in zip(found, EXPECTED.items(), strict=True):
        told = result.first_reason
        if problem is None:
            is_so = result.verdict == "passed"
        else:
            after, _, words = problem.partition(": ")
            is_so = bool(re.search(f"calls.yaml:{lines[result.name] + int(after)}: {words}", told))
        if not is_so:
            astray[steps] = told or result.verdict
    assert astray == {}


def assert_verdict(found: ScenarioResult, problem: str | None) -> None:
    if problem is None:
        assert found.verdict == "passed", found.first_reason
    else:
        assert found.verdict == "failed"
        assert re.search(f"calls.yaml{problem}", found.first_reason), found.first_reason


@pytest.mark.virtual_clock
@pytest.mark.parametrize("protocol", ["native", "realtime"])
@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ("{cut: true, stopped_within_ms: 500}", None),
        ("{cut: false}", ":7: the answer was cut"),
        ("{stopped_within_ms: 40}", r":7: the answer stopped \d+ ms after the caller began, not within 40"),
    ],
)
async def test_an_answer_is_interrupted_after_so_much_of_it(
    folder: Path, protocol: str, expected: str, problem: str | None
) -> None:
    steps = (
        "type: Tell me a story.\ninterrupt: {sound: said.wav, after_ms: 1500}\n"
        f"hear: {expected}\nhear: {{said: Sure}}"
    )
    engine = engine_that(*STORY, heard=(TranscriptOutput("What time is it?"), said("Sure."), *SHORT, DONE))
    more = "  protocol: realtime\n" if protocol == "realtime" else CUTS
    found = await results(engine, file_of(folder, steps, more))
    assert_verdict(found, problem)
    talk = dict(found.runs[0].report.talk)
    assert talk["caller"] == "(said.wav)"
    if problem is None:
        assert [what for who, what in found.runs[0].report.talk if who == "server"][1] == "Sure."


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("most", "problem"), [(9, None), (1, r":7: the history keeps \d words: .*, not at most 1")])
async def test_what_the_history_keeps_is_asked_for(folder: Path, most: int, problem: str | None) -> None:
    steps = (
        "type: Tell me a story.\ninterrupt: {sound: said.wav, after_ms: 2500}\n"
        f"hear: {{cut: true, kept_at_most_words: {most}}}"
    )
    engine = engine_that(*STORY, heard=(TranscriptOutput("Stop."), said("Sure."), *SHORT, DONE))
    found = await results(engine, file_of(folder, steps, "  protocol: realtime\n"))
    assert_verdict(found, problem)
    native = await results(
        engine_that(*STORY, heard=(TranscriptOutput("Stop."), said("Sure."), *SHORT, DONE)),
        file_of(folder, steps, CUTS),
    )
    assert (native.verdict, native.runs[0].report.skipped) == (
        "passed",
        ["kept: the server does not tell it (protocol: realtime does)"],
    )


@pytest.mark.virtual_clock
async def test_an_answer_that_speech_may_not_interrupt_plays_to_its_end(folder: Path) -> None:
    steps = "type: Tell me a story.\ninterrupt: {sound: said.wav, after_ms: 1500}\nhear: {cut: false, said: lighthouse}"
    more = "  session: {turn_detection: {duck: false, interrupt_response: false}}\n"
    found = await results(engine_that(*STORY, heard=HEARD), file_of(folder, steps, more))
    assert_verdict(found, None)


@pytest.mark.virtual_clock
async def test_an_answer_that_goes_on_after_a_cough_was_not_cut(folder: Path) -> None:
    steps = "type: Tell me a story.\ninterrupt: {sound: said.wav, after_ms: 1500}\nhear: {cut: false, said: lighthouse}"
    found = await results(engine_that(*STORY, heard=()), file_of(folder, steps, CUTS))
    assert_verdict(found, None)


class AsksTheWeather(HearingEngine):
    """Calls a tool, says something after a while, and tells the result."""

    def __init__(self, *arguments: str) -> None:
        super().__init__((), tools=True)
        self._arguments = arguments

    def steps(self, request: Any, taken: list[Any]) -> Any:
        if any(chunk.tool_call_id for chunk in taken):
            return [said("It is 18 degrees."), *SHORT, DONE]
        return [*tool_call("weather", *self._arguments), Finished(FinishReason.TOOL_CALLS, Usage())]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("protocol", ["native", "realtime"])
@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("name: weather, arguments: {city: paris}, after_ms: 1000", None),
        ("name: weather, arguments: {city: Rome}", ":6: called weather with city = 'Paris' instead of 'Rome'"),
        ("name: weather, arguments: {day: x}", ":6: called weather without the argument day"),
        ("name: clock", ":6: the tool clock was not called for 5 s"),
    ],
)
async def test_tools_are_called_and_their_results_answered(
    folder: Path, protocol: str, wanted: str, problem: str | None
) -> None:
    more = f"  protocol: {protocol}\n  session: {{tools: [{WEATHER}], tool_filler: false}}\n"
    if protocol == "realtime":
        more = more.replace(", tool_filler: false", "")
    steps = f"type: How is it?\ntool_result: {{{wanted}, result: '18'}}\nhear: {{said: 18 degrees}}"
    file = file_of(folder, steps, more)
    found = await results(AsksTheWeather('{"city": ', '"Paris"}'), file)
    assert_verdict(found, problem)


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ("tool: {name: weather, arguments: {city: PARIS}}", None),
        ("tool: {name: weather, arguments: {city: Rome}}", ":6: called weather with city"),
        ("tool: {name: clock}", ":6: called weather"),
    ],
)
async def test_a_call_is_expected_of_an_answer(folder: Path, expected: str, problem: str | None) -> None:
    more = f"  session: {{tools: [{WEATHER}], tool_filler: false}}\n"
    file = file_of(folder, f"type: How is it?\nhear: {{{expected}}}", more)
    assert_verdict(await results(AsksTheWeather('{"city": "Paris"}'), file), problem)
    no_tool = await results(engine_that(*PARIS), file)
    assert_verdict(no_tool, ":6: no tool was called; said 'The capital")


@pytest.mark.virtual_clock
async def test_silence_while_a_tool_runs_is_told(folder: Path) -> None:
    more = f"  session: {{tools: [{WEATHER}], tool_filler: false}}\n"
    steps = (
        "type: How is it?\ntool_result: {name: weather, result: '18', after_ms: 3000}\n"
        "hear: {sounding_during_tool: {within_ms: 1000}}"
    )
    found = await results(AsksTheWeather("{}"), file_of(folder, steps, more))
    assert_verdict(found, r":7: nothing was said for 3\d\d\d ms after the tool was called, not within 1000")
    left_out = await results(AsksTheWeather("{}"), file_of(folder, steps, more), times=False)
    assert_verdict(left_out, None)


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("language", "problem"), [("de", None), ("en", ":6: the speech was taken for de, not en")])
async def test_the_language_that_was_heard_is_compared(folder: Path, language: str, problem: str | None) -> None:
    spoken = TranscriptOutput("Guten Tag.", hearing=Hearing(language="german"))
    engine = engine_that(*PARIS, heard=(spoken, *PARIS))
    found = await results(engine, file_of(folder, f"sound: said.wav\nhear: {{language: {language}}}"))
    assert_verdict(found, problem)


@pytest.mark.virtual_clock
async def test_a_lost_connection_is_resumed_without_a_word_lost(folder: Path) -> None:
    steps = (
        "type: Where?\nlose_network: 1.0\nhear: {said: Paris}\n"
        "sound: said.wav\nlose_network: 0.2\nhear: {said: Paris, heard: What is the capital?}"
    )
    found = await results(engine_that(*PARIS, heard=HEARD), file_of(folder, steps))
    assert_verdict(found, None)
    kinds = [type(line).__name__ for line in found.runs[0].recorded.lines]
    assert kinds.count("OpenedLine") == 3


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("steps", "more", "reason"),
    [
        ("dial: '1'", "", "needs: telephony (dial)"),
        ("hear: {said: {judge: Was it good?}}", "", "needs: a judge (--judge)"),
        ("lose_network: 1", "  protocol: realtime\n", "needs: native (lose_network)"),
        ("pause: 1", "  protocol: realtime\n  session: {greeting: Hello.}\n", "needs: native (session.greeting)"),
        (
            "pause: 1",
            "  protocol: realtime\n  session: {turn_detection: {duck: true}}\n",
            "needs: native (session.turn_detection.duck)",
        ),
        (
            "pause: 1",
            "  session: {turn_detection: null}\n",
            "needs: a microphone that is not open (session.turn_detection)",
        ),
    ],
)
async def test_what_the_target_does_not_have_is_skipped_by_name(
    folder: Path, steps: str, more: str, reason: str
) -> None:
    found = await results(engine_that(*PARIS), file_of(folder, steps, more))
    assert found.verdict == "skipped"
    assert found.first_reason.startswith(reason)


@pytest.mark.virtual_clock
async def test_settings_that_the_server_refuses_fail_with_the_line_of_the_scenario(folder: Path) -> None:
    found = await results(engine_that(*PARIS), file_of(folder, "pause: 1", "  session: {task: sing}\n"))
    assert_verdict(found, ":3: the server does not take the session: .*task")


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        ("{answers: 2, errors: 0, said: Paris, not_said: Rome}", None),
        ("{answers: 1}", ":3: 2 answers, not 1"),
        ("{errors: 1}", r":3: 0 errors \(none\), not 1"),
        ("{said: Rome}", ":3: said .*, without 'Rome'"),
        ("{median: {within_ms: 5000}}", None),
        ("{median: {within_ms: 0}}", r":3: the median of the first sounds is \d+ ms, not within 0"),
        ("{median: {decided_within_audio_ms: 5000}}", None),
        (
            "{median: {decided_within_audio_ms: 0}}",
            r":3: the median of the ends of turns is \d+ ms of audio, not",
        ),
    ],
)
async def test_the_whole_call_is_compared(folder: Path, expect: str, problem: str | None) -> None:
    steps = "type: Where?\nhear: {}\nsound: said.wav\nhear: {}"
    file = file_of(folder, steps, f"  repeat: 2\n  expect: {expect}\n")
    found = await results(engine_that(takes(0.1), *PARIS, heard=HEARD), file)
    assert_verdict(found, problem)
    assert [run.seed for run in found.runs] == [0, 1]


@pytest.mark.virtual_clock
async def test_a_median_of_nothing_is_a_check_that_was_skipped(folder: Path) -> None:
    more = "  expect: {median: {within_ms: 5000, decided_within_audio_ms: 1}}\n"
    found = await results(engine_that(*PARIS), file_of(folder, "type: Where?\nhear: {}", more))
    wanted = "median of the ends of turns: nothing was measured"
    assert (found.verdict, found.runs[0].report.skipped) == ("passed", [wanted])


@pytest.mark.virtual_clock
async def test_equal_seeds_send_equal_sound(folder: Path) -> None:
    more = "  room: {noise_db: -40, loss: 0.2, echo_db: -20, echo_delay_ms: 40}\n"
    file = file_of(folder, "sound: said.wav\npause: 1", more)
    first, again, other = [
        (await results(engine_that(*PARIS), file, seed=seed)).runs[0].recorded.said[: 40 * 640] for seed in (7, 7, 8)
    ]
    assert first == again
    assert first != other
    lost = sum(not any(first[at : at + 640]) for at in range(0, len(first), 640))
    assert 0 < lost < 20


@pytest.mark.virtual_clock
async def test_a_telephone_sends_8_khz_in_mu_law(folder: Path) -> None:
    file = file_of(folder, "sound: said.wav\nhear: {said: Paris}", "  room: {band: telephone}\n")
    found = await results(engine_that(*PARIS, heard=HEARD), file)
    assert_verdict(found, None)
    sent = [orjson.loads(line.text or "") for line in found.runs[0].recorded.lines if isinstance(line, ReceivedLine)]
    assert sent[0]["input_audio"] == {"format": "pcmu", "sample_rate": 8000, "channels": 1}
    assert {len(decoded(frame["payload"])) for frame in sent if frame["type"] == "input_chunk"} == {160}


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("protocol", "most"), [("native", 0), ("native", 2000), ("realtime", 0), ("realtime", 2000)])
async def test_the_audio_until_the_turn_was_decided_is_bounded(folder: Path, protocol: str, most: int) -> None:
    steps = f"sound: said.wav\nhear: {{decided_within_audio_ms: {most}}}"
    file = file_of(folder, steps, f"  protocol: {protocol}\n")
    found = await results(engine_that(*PARIS, heard=HEARD), file, times=False)
    problem = r":6: the turn was decided \d+ ms of audio after the speech, not within 0"
    assert_verdict(found, None if most else problem)
    assert found.runs[0].report.skipped == []


@pytest.mark.virtual_clock
async def test_another_server_of_the_realtime_api_gets_documented_events_alone(folder: Path) -> None:
    steps = "show: dot.png\ntype: How is it?\ntool_result: {name: weather, result: '18'}\nhear: {said: 18 degrees}"
    (folder / "dot.png").write_bytes(base64.b64decode(DOT))
    more = f"  session: {{tools: [{WEATHER}], voice: alloy, instructions: Be kind., modalities: [audio]}}\n"
    found = await results(AsksTheWeather("{}"), file_of(folder, steps, more), realtime_only=True)
    assert found.verdict == "passed", found.first_reason
    known = openai_names()
    sent = [orjson.loads(line.text or "") for line in found.runs[0].recorded.lines if isinstance(line, ReceivedLine)]
    assert {"session.update", "conversation.item.create", "response.create"} < {event["type"] for event in sent}
    names = {f"client.{event['type']}.{name}" for event in sent for name in event if name != "type"}
    assert names - known == set()
    assert {f"session.{name}" for name in sent[0]["session"]} - known == set()


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ('{"type": "session.updated", "session": {"audio": 1}}', "a message that cannot be read .*'audio'|.*audio"),
        ('{"type": "error", "error": {"code": "no", "message": "not today"}}', "does not take the session: not today"),
        (None, "does not take the session: 1000"),
    ],
)
async def test_a_server_that_answers_otherwise_is_told(folder: Path, message: str | None, problem: str) -> None:
    async def answer(connection: ServerConnection) -> None:
        await connection.send('{"type": "session.created", "session": {}}')
        await connection.recv()
        if message is not None:
            await connection.send(message)
            await connection.wait_closed()

    tools = CallTools(speech=CallersSpeech(), ears=Ears(), patience_ms=5000)
    models: dict[str, ChatModel] = {}
    voice = CallersVoice("hibari")
    options = RunOptions(tools=tools, voice=voice, model_of=models.__getitem__, realtime_only=True)
    file = file_of(folder, "pause: 1")
    async with serve(answer, "127.0.0.1", 0) as server:
        target = Target.parse(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (found,) = [one async for one in run_all([(file, file.scenarios[0])], target, options)]
    tools.ears.close()
    assert_verdict(found, f":3: .*{problem}")


async def test_a_voice_that_is_not_there_is_told() -> None:
    with pytest.raises(ScenarioUnusable, match="voices are hibari"):
        CallersVoice.parse("somebody")


JUDGED = "type: Where?\nhear: {said: [{judge: Was it right?}], not_said: {judge: Was it rude?}}"


@pytest.mark.parametrize(
    ("verdict", "problem"),
    [
        ("Yes, it was.", r":6: the judge says yes to 'Was it rude\?': Yes, it was\."),
        ("**No**", r":6: the judge says no to 'Was it right\?': \*\*No\*\*"),
        ("Perhaps.", r":3: the judge said neither yes nor no: 'Perhaps\.'"),
    ],
)
async def test_a_judge_says_yes_or_no(folder: Path, verdict: str, problem: str) -> None:
    async with live_server(HearingEngine([said(verdict), DONE])) as model:
        judge = ChatModel(f"http://127.0.0.1:{model.port}/v1")
        found = await results(engine_that(said("Paris."), DONE), file_of(folder, JUDGED), judge=judge)
    assert_verdict(found, problem)


async def test_a_judge_that_is_not_there_is_told(folder: Path) -> None:
    judge = ChatModel("http://127.0.0.1:9/v1#one")
    found = await results(engine_that(said("Paris."), DONE), file_of(folder, JUDGED), judge=judge)
    assert_verdict(found, ":3: http://127.0.0.1:9/v1 cannot be reached")
    with pytest.raises(ScenarioUnusable, match="is not the URL of a language model"):
        ChatModel("somewhere")


class Plays(HearingEngine):
    """A caller who asks once, and hangs up."""

    def steps(self, request: Any, taken: list[Any]) -> Any:
        return [
            said("Goodbye." if b"assistant" in repr(request).encode() and self.inputs[1:] else 'Caller: "Hello."'),
            DONE,
        ]


async def test_a_language_model_plays_the_caller(folder: Path) -> None:
    text = "session: {turn_detection: {type: server_vad}}\nscenarios:\n- name: one\n"
    text += "  persona: {who: A pupil, goal: The capital of France, turns: 3, llm: model}\n  expect: {said: Paris}\n"
    file = parse(text.encode(), folder / "calls.yaml")
    async with live_server(Plays()) as model:
        player = ChatModel(f"http://127.0.0.1:{model.port}/v1")
        found = await results(engine_that(*PARIS, heard=HEARD), file, speech=SaidAloud(folder), player=player)
    assert_verdict(found, None)
    assert found.runs[0].report.talk == [("caller", "Hello."), ("server", "The capital of France is Paris.")]


class SaidAloud(CallersSpeech):
    """Says everything by the same recording."""

    async def of(self, voice: CallersVoice, text: str) -> Samples:
        return recording(self._folder / "said.wav")
