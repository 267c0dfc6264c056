"""The form of files of scenarios: what is read, and each error with its line."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import pytest

from omni_ws.scenarios.form import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_REPEAT,
    EndCall,
    FormError,
    HearAnswer,
    Interrupt,
    Judged,
    SayText,
    parse,
    pattern_of,
    read_file,
)

FILE = Path("calls.yaml")
CALL = """\
scenarios:
  - name: a
    caller:
      - {say: Hello.}
"""


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(FormError) as caught:
        parse(text.encode() if isinstance(text, str) else text, FILE)
    return caught.value.problems


def step(text: str) -> list[str]:
    return problems(f"{CALL}      - {text}\n")


def test_a_file_is_read_with_the_line_of_each_step() -> None:
    file = parse(
        b"""\
server: {llm: rules}
voice: hibari
defaults: {within_ms: 8000}
scenarios:
  - name: greeting
    tags: [gate]
    room: {noise_db: -45, band: telephone}
    caller:
      - say: No.
      - interrupt: {say: Stop, after_words: 5}
      - hear: {said: [no, {judge: Was it polite?}], cut: true}
      - hang_up
""",
        FILE,
    )
    (placed,) = file.scenarios
    assert (file.server, file.voice, file.defaults.within_ms) == ({"llm": "rules"}, "hibari", 8000)
    assert (placed.line, [one.line for one in placed.steps]) == (5, [9, 10, 11, 12])
    said, interrupt, heard, end = (one.step for one in placed.steps)
    assert isinstance(said, SayText)
    assert said.say == "No."
    assert isinstance(interrupt, Interrupt)
    assert isinstance(heard, HearAnswer)
    assert heard.hear.said == ["no", Judged(judge="Was it polite?")]
    assert isinstance(end, EndCall)


def test_json_is_read_as_well() -> None:
    file = parse(
        b'{"scenarios": [{"name": "a", "caller": [{"type": "x", "voice": 1}]}]}'.replace(b', "voice": 1', b""), FILE
    )
    assert file.scenarios[0].scenario.name == "a"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("say: 42", "calls.yaml:5: Expected `str`, got `int`"),
        ("{hear: {sayd: Paris}}", "calls.yaml:5: unknown key `sayd`"),
        ("{hear: {within_ms: -1}}", "calls.yaml:5: Expected `float` >= 0.0"),
        ("{hear: {said: /(/}}", "calls.yaml:5: not a regular expression: /(/: "),
        ("{hear: {said: [x, {judge: x, b: 1}]}}", "calls.yaml:5: unknown key `b`"),
        ("{hear: {none: 2, not_said: x}}", "calls.yaml:5: `none` stands alone: "),
        ("{hear: {error: rate_limited, within_ms: 900}}", "calls.yaml:5: `error` stands alone: "),
        ("{interrupt: {say: x}}", "calls.yaml:5: an interruption has `after_words` or `after_ms`"),
        ("{interrupt: {say: x, sound: y, after_ms: 1}}", "calls.yaml:5: an interruption has `say` or `sound`"),
        ("{dial: 12x}", "calls.yaml:5: Expected `str` matching regex"),
        ("{pause: 601}", "calls.yaml:5: Expected `float` <= 600.0"),
        ("dance", "calls.yaml:5: a step has one of the keys say, "),
        ("{hang_up: false}", "calls.yaml:5: a step has one of the keys say, "),
        ("{say: x, pause: 1}", "calls.yaml:5: a step has one of the keys say, "),
        ("{tool_result: {name: x}}", "calls.yaml:5: missing key `result`"),
    ],
)
def test_a_step_that_is_wrong_is_told_with_its_line(text: str, problem: str) -> None:
    (found,) = step(text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "calls.yaml:1: the file is empty"),
        ("scenarios: []", "calls.yaml:1: Expected `array` of length >= 1"),
        ("voice: x", "calls.yaml:1: missing key `scenarios`"),
        (f"{CALL}extra: 1\n", "calls.yaml:5: unknown key `extra`"),
        ("scenarios:\n  - name: a\n", "calls.yaml:2: a scenario has either `caller`, with steps, or `persona`"),
        (f"{CALL}  - name: a\n    caller: [hang_up]\n", "calls.yaml:5: a second scenario with the name a"),
        ("scenarios:\n  - name: a\n    name: b\n", "calls.yaml:3: the key `name` is there twice"),
        ("scenarios: [\n", "calls.yaml:2: not YAML: "),
        (f"{CALL}---\na: 1\n", "calls.yaml:5: a second document"),
        (f"{CALL}? [a]\n: 1\n", "calls.yaml:5: a key has to be a text"),
        ("a: &x [1]\nb: *x\n", "calls.yaml:1: aliases and anchors are not allowed"),
        ("scenarios: !!python/object/apply:os.system [ls]\n", "calls.yaml:1: tags are not allowed"),
        (b"a: \xff\n", "calls.yaml:1: not UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_the_line(text: str | bytes, problem: str) -> None:
    (found,) = problems(text)
    assert found.startswith(problem)


def test_all_steps_that_are_wrong_are_told() -> None:
    assert [one.partition(": ")[0] for one in step("dance\n      - {say: 1}")] == ["calls.yaml:5", "calls.yaml:6"]


def test_a_file_may_be_as_large_as_the_limit() -> None:
    assert parse(CALL.encode().ljust(MAX_BYTES, b"\n"), FILE).scenarios
    assert problems(CALL.encode().ljust(MAX_BYTES + 1, b"\n")) == ["calls.yaml:1: more than 1,048,576 bytes"]


def test_levels_are_limited() -> None:
    def nested(levels: int) -> bytes:
        # The mapping of the file is one level, and that of the session another.
        return f"session: {{a: {'[' * (levels - 2)}{']' * (levels - 2)}}}\n{CALL}".encode()

    assert parse(nested(MAX_DEPTH), FILE).scenarios
    assert problems(nested(MAX_DEPTH + 1)) == [f"calls.yaml:1: more than {MAX_DEPTH} levels"]
    (found,) = problems("[" * 100_000)
    assert re.match("calls.yaml:1: (more than 32 levels|not YAML: exceeded maximum nesting)", found)


def test_repetitions_are_limited() -> None:
    assert parse(f"{CALL}    repeat: {MAX_REPEAT}\n".encode(), FILE).scenarios[0].scenario.repeat == MAX_REPEAT
    assert problems(f"{CALL}    repeat: {MAX_REPEAT + 1}\n") == [f"calls.yaml:5: Expected `int` <= {MAX_REPEAT}"]


def test_scalars_are_those_of_yaml_1_2() -> None:
    file = parse(
        b"session: {a: no, b: 12:30, c: 1e3, d: -7, e: null, f: true, g: 2026-01-01, h: 'true'}\n" + CALL.encode(), FILE
    )
    assert file.session == {
        "a": "no",
        "b": "12:30",
        "c": 1000.0,
        "d": -7,
        "e": None,
        "f": True,
        "g": "2026-01-01",
        "h": "true",
    }


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormError, match="No such file"):
        read_file(tmp_path / "none.yaml")


def test_a_phrase_in_slashes_is_a_regular_expression() -> None:
    found = pattern_of("/par[ie]s/")
    assert found is not None
    assert found.search("PARIS")
    assert pattern_of("and/or") is None


def test_the_examples_of_the_documentation_are_read() -> None:
    text = (Path(__file__).parents[2] / "docs/testing.md").read_text(encoding="utf-8")
    whole, steps = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(parse(whole.encode(), FILE).scenarios[0].steps) == 5
    assert (
        len(parse(f"scenarios:\n- name: a\n  caller:\n{indent(steps, '  ')}".encode(), FILE).scenarios[0].steps) == 11
    )
