"""The ledger beside a slow model, in random conversations; written to bytes and restored at random moments.

The model has a loudspeaker that plays one millisecond after the other, and works out the history anew from all facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from omni_ws.core.chunks import OutputChunk, OutputModality, ToolCallFragment, Word
from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry, SentAudio
from omni_ws.core.quota import ByteBudget

WORD_MS = 100
STEPS = 150


@dataclass
class Facts:
    """All that is known of one entry."""

    name: str
    asked: str
    words: list[str] = field(default_factory=list)
    call: str | None = None
    result: str | None = None
    late: list[str] = field(default_factory=list)
    sent_ms: int = 0
    played_ms: int = 0
    number: int | None = None
    reported_ms: int | None = None
    cut_ms: int | None = None
    read: bool = False
    finished: bool = False
    gone: bool = False

    @property
    def heard(self) -> str:
        words = self.words
        if self.cut_ms is not None:
            words = [word for index, word in enumerate(words) if index * WORD_MS < self.cut_ms]
        return " ".join(words)


class Model:
    def __init__(self, *, clocked: bool) -> None:
        self.clocked = clocked
        self.reporting = False
        self.facts: list[Facts] = []
        self.line: list[Facts] = []
        self.at = 0

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.go_on()
            playing = self.line[self.at] if self.line else None
            if playing is not None and playing.cut_ms is None and playing.played_ms < playing.sent_ms:
                playing.played_ms += 1
        self.go_on()

    def go_on(self) -> None:
        while self.at + 1 < len(self.line):
            playing = self.line[self.at]
            if playing.cut_ms is None and playing.played_ms < playing.sent_ms:
                return
            self.at += 1

    def send(self, facts: Facts, number: int, count: int) -> None:
        if facts.number is None:
            facts.number = number
            self.line.append(facts)
        facts.sent_ms += count * WORD_MS
        self.go_on()

    def report(self, played_ms: int, *, name: str | None, number: int) -> None:
        if name is not None:
            index = next((index for index, one in enumerate(self.line) if one.name == name), None)
        else:
            behind = self.line[: self.at + 1]
            index = max((index for index, one in enumerate(behind) if (one.number or 0) <= number), default=None)
        if index is None or any(one.reported_ms is not None for one in self.line[index + 1 :]):
            return
        facts = self.line[index]
        played_ms = min(played_ms, facts.sent_ms)
        if played_ms < (facts.reported_ms or 0):
            return
        self.reporting = True
        if facts.cut_ms is None:
            facts.reported_ms = facts.played_ms = played_ms
        elif not facts.read:
            facts.cut_ms = facts.reported_ms = played_ms
        for earlier in self.line[:index]:
            earlier.played_ms = earlier.sent_ms
            if earlier.reported_ms is not None and earlier.cut_ms is None:
                earlier.reported_ms = earlier.sent_ms
        for later in self.line[index + 1 :]:
            later.played_ms = 0
        self.at = index
        self.go_on()

    def cut(self, facts: Facts) -> None:
        if facts.cut_ms is None:
            by_line = facts.played_ms if self.clocked or self.reporting else facts.sent_ms
            facts.cut_ms = by_line if facts.reported_ms is None else facts.reported_ms
            self.go_on()

    def silence(self) -> None:
        for facts in self.line[self.at :]:
            if facts.cut_ms is None and facts.played_ms < facts.sent_ms:
                self.cut(facts)

    def history(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Role, text and calls of each message."""
        said: list[tuple[str, str, list[str]]] = []
        for facts in self.facts:
            if facts.finished and not facts.gone:
                said += [("tool", facts.result, [])] if facts.result else []
                said.append(("user", " ".join(filter(None, [facts.asked, *facts.late])), []))
                said.append(("assistant", facts.heard, [facts.call] if facts.call else []))
        said = [one for one in said if one[1] or one[2]]
        called: set[str] = set()
        for one in tuple(said):
            called |= set(one[2])
            if one[0] == "tool" and one[1] in called:
                self.move_call(said, said.index(one), one[1])
            elif one[0] == "tool":
                said.remove(one)
        joined: list[tuple[str, str, list[str]]] = []
        for role, text, calls in said:
            if joined and joined[-1][0] == role != "tool":
                text = " ".join(filter(None, [joined[-1][1], text]))
                joined[-1] = (role, text, [*joined[-1][2], *calls])
            elif text or calls:
                joined.append((role, "result" if role == "tool" else text, calls))
        return [(role, text, tuple(sorted(calls))) for role, text, calls in joined]

    @staticmethod
    def move_call(said: list[tuple[str, str, list[str]]], result: int, call: str) -> None:
        """Have a call stand in the message before its result and those beside it."""
        while result and said[result - 1][0] == "tool":
            result -= 1
        before = said[result - 1] if result else ("", "", [])
        if call in before[2]:
            return
        for one in said:
            if call in one[2]:
                one[2].remove(call)
        if before[0] == "assistant":
            before[2].append(call)
        else:
            said.insert(result, ("assistant", "", [call]))


class Walk:
    """Does the same to both, and compares."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.budget = ByteBudget(1 << 24)
        self.ledger = Ledger(1 << 20, self.budget)
        self.model = Model(clocked=self.random.random() < 0.5)
        self.ledger.clocked = self.model.clocked
        self.ms = 1000
        self.number = 0
        self.open: Facts | None = None

    @property
    def now(self) -> float:
        return self.ms / 1000

    def entry(self, facts: Facts) -> LedgerEntry:
        entry = self.ledger.find(facts.name)
        assert entry is not None
        return entry

    def step(self) -> None:
        steps = [self.say, self.say, self.finish, self.wait, self.report, self.silence, self.restore]
        steps += [self.cut, self.cut_earlier, self.truncate, self.late, self.compare]
        self.random.choice(steps)()

    def say(self) -> None:
        if self.open is None:
            self.begin()
        facts = self.open
        assert facts is not None
        if facts.cut_ms is not None:
            return
        entry, count = self.entry(facts), self.random.randrange(1, 8)
        begin = len(facts.words)
        new = [f"w{self.number}.{index}" for index in range(count)]
        facts.words += new
        entry.say(("" if begin == 0 else " ") + " ".join(new))
        self.number += 1
        start, end = begin * WORD_MS, (begin + count) * WORD_MS
        self.ledger.send(entry, self.number, start, end, self.now)
        times = [(begin + index) * WORD_MS for index in range(count)]
        entry.pronounce([Word(word, at, at + 90) for word, at in zip(new, times, strict=True)])
        chunk = OutputChunk(facts.name, self.number, OutputModality.AUDIO, payload=b"x", start_ms=start)
        self.ledger.keep_unheard(entry, SentAudio(chunk, start, end, 100), self.now)
        self.model.send(facts, self.number, count)

    def begin(self) -> None:
        asked = f"q{len(self.model.facts)}" if self.random.random() < 0.7 else ""
        facts = self.open = Facts(f"r{len(self.model.facts)}", asked)
        self.model.facts.append(facts)
        entry = self.ledger.open(
            facts.name, speaks=True, writes=self.random.random() < 0.5, resumable=self.random.random() < 0.3
        )
        entry.take_text(facts.asked.encode())
        if self.random.random() < 0.3:
            facts.call = f"call_{facts.name}"
            entry.call(ToolCallFragment(0, id=facts.call, name="f", arguments="{}"))
        earlier = [one.call for one in self.model.facts[:-1] if one.call and one.finished and not one.gone]
        open_calls = [call for call in earlier if all(one.result != call for one in self.model.facts)]
        if open_calls and self.random.random() < 0.5:
            facts.result = self.random.choice(open_calls)
            entry.take_text(b"result", facts.result)

    def finish(self) -> None:
        facts, self.open = self.open, None
        if facts is not None:
            facts.finished = True
            cancelled = facts.cut_ms is not None
            self.ledger.finish(self.entry(facts), whole=not cancelled, cancelled=cancelled)

    def wait(self) -> None:
        count = self.random.choice([1, 40, 200, 900])
        self.ms += count
        self.model.tick(count)

    def report(self) -> None:
        played_ms = self.random.randrange(0, 1200)
        names = [facts.name for facts in self.model.facts[-3:]] + ["nobody"]
        name = self.random.choice([None, *names])
        number = self.random.randrange(self.number + 2)
        self.ledger.report(played_ms, now=self.now, request_id=name, sequence_id=number)
        self.model.report(played_ms, name=name, number=number)

    def silence(self) -> None:
        self.ledger.silence(self.now)
        self.model.silence()

    def cut(self) -> None:
        if self.open is not None and self.open.sent_ms:
            self.ledger.cut(self.entry(self.open), self.now)
            self.model.cut(self.open)

    def cut_earlier(self) -> None:
        facts = self.random.choice(self.model.facts[-3:]) if self.model.facts else None
        if facts is not None and facts.sent_ms:
            self.ledger.cut(self.entry(facts), self.now)
            self.model.cut(facts)

    def truncate(self) -> None:
        known = [facts for facts in self.model.facts if not facts.gone]
        if self.open is None and known and self.random.random() < 0.2:
            first = self.random.choice(known[-3:])
            index = self.model.facts.index(first)
            while self.joined(index):
                index -= 1
                while self.model.facts[index].gone or not self.left(index):
                    index -= 1
            dropped = [facts for facts in self.model.facts[index:] if not facts.gone]
            assert self.ledger.history.truncate(first.name) == len(dropped)
            for facts in dropped:
                facts.gone = True

    def kept(self, index: int) -> bool:
        return not self.model.facts[index].gone and self.left(index)

    def left(self, index: int) -> bool:
        """Whether an entry left anything in the history."""
        facts = self.model.facts[index]
        return bool(facts.asked or facts.late or facts.heard or facts.call or facts.result)

    def joined(self, index: int) -> bool:
        """Whether the user's message of this entry continues that of one before."""
        later = [number for number in range(index, len(self.model.facts)) if self.kept(number)]
        first = self.model.facts[later[0]] if later else None
        if first is None or first.result:
            return False
        earlier = [number for number in range(index) if not self.model.facts[number].gone and self.left(number)]
        before = self.model.facts[earlier[-1]] if earlier else None
        return before is not None and bool(before.asked or before.late) and not before.heard and not before.call

    def late(self) -> None:
        over = [facts for facts in self.model.facts if facts.finished and not facts.gone]
        if over and self.random.random() < 0.3:
            facts = over[-1]
            assert self.ledger.late_transcript(facts.name, "late")
            facts.late.append("late")

    def restore(self) -> None:
        """What was written is what is read; and it goes on with that."""
        held = self.budget.used
        data = self.ledger.to_bytes()
        self.budget = ByteBudget(1 << 24)
        self.ledger = Ledger(0, self.budget)
        self.ledger.restore(data)
        assert msgspec.msgpack.decode(self.ledger.to_bytes()) == msgspec.msgpack.decode(data)
        assert self.budget.used == held

    def compare(self) -> None:
        for facts in self.model.facts[-4:]:
            if facts.cut_ms is None:
                played_ms = self.ledger.position_ms(self.entry(facts), self.now)
                assert played_ms == pytest.approx(facts.played_ms, abs=0.01)
        rest = [one for one in self.model.line[self.model.at :] if one.cut_ms is None]
        assert self.ledger.playing(self.now) is any(one.played_ms < one.sent_ms for one in rest)
        for facts in self.model.facts:
            facts.read = facts.read or facts.cut_ms is not None
        seen = [
            (one.role, one.text, tuple(sorted(call.id for call in one.tool_calls)))
            for one in self.ledger.messages(now=self.now)
        ]
        assert seen == self.model.history()


@pytest.mark.parametrize("seed", range(40))
def test_the_ledger_is_the_model(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    walk.compare()
    walk.ledger.close()
    assert walk.budget.used == 0
