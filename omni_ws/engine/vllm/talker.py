"""Talker: generates codec frames for the text of an answer, clause by clause, with a model of its own.

A TalkerProfile is the prompt format and token layout of such a model.
"""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from omni_ws.engine.base import OutputWriter
from omni_ws.engine.channel import Channel, StageLink
from omni_ws.engine.clauses import ClauseSplitter, TextClause, clauses_as_they_come, is_speakable
from omni_ws.engine.tts.speech_engine import SpokenClauses
from omni_ws.engine.vllm.code2wav import CodecFrames, FrameLayout
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.errors import EngineFailed, InvalidValue
from omni_ws.profiler import events

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


#: The names in ``stage_sampling.talker``. ``max_tokens`` limits the codec tokens of the whole answer.
TALKER_SAMPLING: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"}
)

#: The link from the Thinker, whose items are pieces of text: 2,000 characters, or about two minutes of speech.
TEXT_LINK: Final = StageLink(2_000, len)


#: The limits of the first clause in characters (see ClauseSplitter). Other clauses may be longer; the first one is kept
#: short, because it determines the time to first audio.
FIRST_COMMA_AFTER: Final = 12
FIRST_LONGEST: Final = 90


class TalkerModel(LanguageModel):
    """A speech language model in vLLM, with the logits processor that constrains it to the codec pattern."""

    def _open(self, args: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from omni_ws.engine.vllm.workers import processor_name

        config = args.create_engine_config()
        # The configuration decides which model runner is used, and so which processor.
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            processor_name(config),
        ]
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)


class Talker:
    """A Stage of one request: pieces of text in, CodecFrames out.

    Each clause is one request to vLLM, and so has the prosody of a complete utterance. While a clause is generated,
    further text waits in the link. ``comma_after`` and ``longest`` are the limits of the first clause; for
    ``begin_after_sec`` see ``clauses_as_they_come``, for ``lexicon`` see GenerationRequest.

    ``sampling`` is ``stage_sampling.talker``. Raises InvalidValue for an unknown voice, and for sampling parameters
    that vLLM refuses.
    """

    name = "talker"

    def __init__(
        self,
        model: TalkerModel,
        profile: TalkerProfile,
        *,
        request_id: str,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        priority: int = 0,
        comma_after: int = FIRST_COMMA_AFTER,
        longest: int = FIRST_LONGEST,
        begin_after_sec: float | None = None,
        lexicon: Mapping[str, str] | None = None,
    ) -> None:
        #: Prompt tokens, generated tokens and whole frames, for the usage of the request.
        self.prompt_tokens = 0
        self.tokens = 0
        self.frames = 0
        #: Whether speech was cut off by ``max_tokens`` or by the limit of a clause.
        self.cut = False
        self._model = model
        self._profile = profile
        self._request_id = request_id
        self._voice = voice
        self._priority = priority
        self._spoken: SpokenClauses | None = None
        self._splitter = ClauseSplitter(first_comma_after=comma_after, first_longest=longest)
        if lexicon:
            self._spoken = SpokenClauses("", lexicon, first_comma_after=comma_after, first_longest=longest)
            self._splitter = self._spoken
        self._begin_after_sec = begin_after_sec
        asked = dict(sampling or {})
        if unknown := asked.keys() - TALKER_SAMPLING:
            raise InvalidValue(
                "unknown sampling parameter of the Talker", param=f"stage_sampling.talker.{min(unknown)}"
            )
        self._tokens_left: int | None = asked.pop("max_tokens", None)
        self._sampling = {**profile.sampling, **asked}
        self._clauses = 0
        profile.spoken_text("", voice)
        self._parameters(max_tokens=1 if self._tokens_left is None else self._tokens_left)

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Speak clause by clause, each as soon as its text is complete."""
        assert sink is not None, "the Talker requires a stage after it"
        come = clauses_as_they_come(source, self._splitter, begin_after_sec=self._begin_after_sec)
        async with aclosing(come) as clauses:
            async for clause in clauses:
                await self._speak(clause, sink)

    async def _speak(self, clause: TextClause, sink: Channel[CodecFrames]) -> None:
        """Generate the frames of one clause.

        The length of the text limits the number of frames, since a model may fail to end its speech.
        """
        if not is_speakable(clause.text):
            return
        slots = len(self._profile.layout.slots)
        most = self._profile.most_frames(clause.text) * slots
        if self._tokens_left is not None:
            most = min(most, self._tokens_left - self._tokens_left % slots)
            if most <= 0:
                self.cut = True
                return
        number, self._clauses = self._clauses, self._clauses + 1
        text_end = clause.end if self._spoken is None else self._spoken.written.written_end(clause.end)
        prompt = self._prompt(clause.text)
        self.prompt_tokens += len(prompt)
        incomplete: list[int] = []  # the tokens of a frame that is not complete; dropped at the end
        parameters = self._parameters(max_tokens=most, clause=number)
        generation = self._model.generate(
            {"prompt_token_ids": prompt},
            parameters,
            f"{self._request_id}-talker-{number}",
            priority=self._priority,
        )
        # Closing the generator aborts the request in vLLM.
        async with aclosing(generation):
            async for output in events.generated(self.name, generation):
                tokens = [token for token in output.outputs[0].token_ids if token not in self._profile.stop]
                self._count(len(tokens))
                incomplete += tokens
                try:
                    codes = self._profile.layout.take_frames(incomplete)
                except ValueError as error:
                    raise EngineFailed("the Talker generated a token outside its codec pattern") from error
                if output.finished:
                    self._note_end(output.outputs[0].finish_reason)
                if len(codes) or output.finished:
                    self.frames += len(codes)
                    await sink.put(CodecFrames(number, codes, output.finished, text_end))

    def _prompt(self, clause: str) -> list[int]:
        text = self._profile.spoken_text(clause, self._voice)
        tokens = self._model.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return self._profile.prompt(tokens)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if self._tokens_left is not None:
            self._tokens_left -= tokens

    def _note_end(self, reason: str | None) -> None:
        """Note whether the clause was cut off. Raises EngineFailed if vLLM ended it for another reason."""
        if reason == "length":
            self.cut = True
        elif reason != "stop":
            raise EngineFailed(f"unexpected finish reason of the Talker: {reason!r}")

    def _parameters(self, *, max_tokens: int, clause: int = 0) -> SamplingParams:
        """Return the sampling parameters of a clause. Raises InvalidValue."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from omni_ws.engine.vllm.workers import Pattern, extra_arguments

        layout = self._profile.layout
        pattern = Pattern(layout.first_token, layout.codebook_size, len(layout.slots), self._profile.stop[0])
        sampling = dict(self._sampling)
        try:
            if sampling.get("seed") is not None:
                sampling["seed"] += clause
            return SamplingParams(
                **sampling,
                max_tokens=max_tokens,
                stop_token_ids=list(self._profile.stop),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
                extra_args=extra_arguments(pattern),
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            field = getattr(error, "parameter", None)
            place = f"stage_sampling.talker.{field}" if field in TALKER_SAMPLING else "stage_sampling.talker"
            raise InvalidValue(f"sampling parameters not supported by the Talker: {error}", param=place) from error


TokenIds: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerProfile:
    """The prompt format, token layout, voices and default sampling of a family of models."""

    name: str
    text: str
    layout: FrameLayout
    codec: str
    prefix: TokenIds = ()
    suffix: TokenIds = ()
    stop: TokenIds = ()
    voices: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: A clause is cut off after ``spare_frames`` plus this many frames for each of its characters, in case the model
    #: does not stop. Slow speech takes about one frame per character.
    frames_per_character: float = 3.0
    spare_frames: int = 36

    def __post_init__(self) -> None:
        if not self.stop:
            raise ValueError("stop must have at least one token id")
        if any(self.layout.first_token <= token < self.layout.end_token for token in self.stop):
            raise ValueError("stop must not contain a codec token")
        self.text.format(voice="", text="")

    def spoken_text(self, clause: str, voice: str | None) -> str:
        """Return the text of the prompt, with the voice inserted. Raises InvalidValue for an unknown voice."""
        if voice is None:
            return self.text.format(voice=next(iter(self.voices.values()), ""), text=clause)
        if voice not in self.voices:
            raise InvalidValue(f"unknown voice {voice!r}; available: {', '.join(self.voices) or 'none'}", param="voice")
        return self.text.format(voice=self.voices[voice], text=clause)

    def prompt(self, text_tokens: list[int]) -> list[int]:
        """Return the token IDs of the prompt. Control and codec tokens that the text spells are dropped."""
        control = {*self.prefix, *self.suffix, *self.stop}
        plain = [
            token
            for token in text_tokens
            if token not in control and not self.layout.first_token <= token < self.layout.end_token
        ]
        return [*self.prefix, *plain, *self.suffix]

    def most_frames(self, clause: str) -> int:
        """Return the limit on the frames of a clause."""
        return self.spare_frames + round(self.frames_per_character * len(clause))


# Orpheus and Maya1 are based on Llama 3, where 128000 begins a text and 128009 ends a message; IDs from 128256 are new.
_LLAMA: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "prefix": (128259, 128000),
        "suffix": (128009, 128260, 128261, 128257),
        "stop": (128258,),
        "layout": FrameLayout(first_token=128266),
        "codec": "hubertsiuzdak/snac_24khz",
    }
)

ORPHEUS: Final = TalkerProfile(
    name="orpheus",
    text="{voice}: {text}",
    voices={name: name for name in ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")},
    sampling={"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3},
    **_LLAMA,
)

#: The voices of Maya1 are descriptions; a profile in a file can define others.
MAYA1: Final = TalkerProfile(
    name="maya1",
    text='<description="{voice}"> {text}',
    voices={
        "woman": "Realistic female voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
        "man": "Realistic male voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
    },
    sampling={"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1},
    **_LLAMA,
)

_KNOWN: Final = {profile.name: profile for profile in (ORPHEUS, MAYA1)}


def find_profile(wanted: str | None, model: str) -> TalkerProfile:
    """Return the profile with the name or file ``wanted``; with None, the one whose name occurs in that of ``model``.

    Raises EngineFailed, with a message for the operator.
    """
    if wanted is None:
        for name, profile in _KNOWN.items():
            if name in Path(model).name.lower():
                return profile
        raise EngineFailed(
            f"no profile known for the Talker {model}; set one with --vllm.talker-profile: "
            f"{', '.join(_KNOWN)}, or a TOML file"
        )
    if wanted in _KNOWN:
        return _KNOWN[wanted]
    return read_profile(Path(wanted))


def read_profile(path: Path) -> TalkerProfile:
    """Read a profile from a TOML file. Raises EngineFailed.

    For example::

        prefix = [128259, 128000]                        # token IDs before the text
        suffix = [128009, 128260, 128261, 128257]        # and after it
        text = "{voice}: {text}"                         # the template of the text
        stop = [128258]                                  # token IDs that end the speech
        first_token = 128266                             # the first codec token
        codebook_size = 4096
        slots = [0, 1, 2, 2, 1, 2, 2]                    # the codebook of each token of a frame
        codec = "hubertsiuzdak/snac_24khz"               # a name, or a folder next to this file
        [voices]                                         # name = replacement of {voice}; the first is the default
        tara = "tara"
        [sampling]                                       # defaults
        temperature = 0.6
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineFailed(f"Talker profile {path} not found; built-in: {', '.join(_KNOWN)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EngineFailed(f"cannot read the Talker profile {path}: {error}") from error
    try:
        return _profile(path, values)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise EngineFailed(f"invalid Talker profile {path}: {error!r}") from error


def _profile(path: Path, values: dict[str, Any]) -> TalkerProfile:
    known = {entry.name for entry in fields(TalkerProfile)} - {"name", "layout"}
    of_layout = {"first_token", "codebook_size", "slots"}
    if unknown := values.keys() - known - of_layout:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
    if not isinstance(values["text"], str) or "{text}" not in values["text"]:
        raise ValueError("text must contain {text}")
    folder = path.parent / str(values["codec"])
    if folder.is_dir():
        values["codec"] = str(folder)
    layout = {key: values.pop(key) for key in of_layout & values.keys()}
    return msgspec.convert({**values, "name": path.stem, "layout": layout}, TalkerProfile)
