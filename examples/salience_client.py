"""Uses token sessions (salience.v1): continues a prompt, scores it, and shows readouts of concepts.

python examples/salience_client.py --tokenizer FOLDER --prompt "It was a dark and"   tokens, coloured by concepts
python examples/salience_client.py --prompt-ids 5,6,7 --max-tokens 20                ids in, ids out
python examples/salience_client.py --tokenizer bytes --prompt "hello" --score        how likely the prompt is

SalienceClient and Session are meant to be reused: they track the list on the server, send only what is new, and
recover from errors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from salience_display import Trace, Vocabulary, load_vocabulary, make_trace

from omni_ws.generated import salience_pb2 as messages
from omni_ws.generated.salience_pb2_grpc import SalienceStub

FAILED, USAGE, INTERRUPTED = 1, 2, 130
EVERYWHERE = messages.PositionRange(start=0, end=2**32 - 1)
#: Retries of a call whose session is busy, or differs from its mirror.
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, and the range of its tokens: [start, end), including vision start and end."""

    data: bytes
    mime: str
    start: int
    end: int


class Session:
    """A token session. ``tokens`` and ``pictures`` mirror the list on the server."""

    def __init__(self, client: SalienceClient, session_id: str, max_model_len: int) -> None:
        self.session_id = session_id
        self.max_model_len = max_model_len
        self.tokens: list[int] = []
        self.pictures: tuple[Picture, ...] = ()
        self._client = client

    async def generate(
        self, tokens: Sequence[int], *, pictures: Sequence[Picture] = (), **fields: Any
    ) -> AsyncGenerator[messages.GenerateEvent, None]:
        """Replaces the list by ``tokens``, sending only what differs, and generates from there.

        ``fields`` are fields of GenerateRequest. Leaving the loop early cancels the call. Raises
        grpc.aio.AioRpcError.
        """
        for attempt in range(ATTEMPTS):
            begun = False
            call = self._call(tokens, pictures, fields)
            try:
                async for event in call:
                    if not begun:
                        begun = True
                        self.tokens, self.pictures = list(tokens), tuple(pictures)
                    if event.WhichOneof("event") == "token" and not event.token.is_prefill:
                        self.tokens.append(event.token.id)
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                again = error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self.synchronise(pictures)
                if begun or not again or attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(_retry_after(error))
            finally:
                if not call.done():
                    call.cancel()
                    await asyncio.shield(self._after_cancel(pictures))

    async def score(self, tokens: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[float]:
        """Returns the natural log-probability of the tokens in each range, given all before them."""
        asked = [messages.PositionRange(start=start, end=end) for start, end in ranges]
        sums = [0.0] * len(ranges)
        async for event in self.generate(tokens, logprobs_ranges=asked):
            token = event.token
            if token.has_sampled_logprob:
                for index, (start, end) in enumerate(ranges):
                    sums[index] += token.sampled_logprob if start <= token.position < end else 0.0
        return sums

    async def fork(self, at: int) -> Session:
        """Creates a session with the first ``at`` tokens, whose computation it shares."""
        request = messages.ForkSessionRequest(session_id=self.session_id, at_position=at)
        answer = await self._client.stub.ForkSession(request, metadata=self._client.metadata)
        child = Session(self._client, answer.session_id, self.max_model_len)
        child.tokens = self.tokens[:at]
        child.pictures = tuple(one for one in self.pictures if one.end <= at)
        return child

    async def synchronise(self, pictures: Sequence[Picture] = ()) -> None:
        """Queries the list on the server. ``pictures`` may be there since a call that failed."""
        request = messages.DumpSessionRequest(session_id=self.session_id)
        answer = await self._client.stub.DumpSession(request, metadata=self._client.metadata)
        self.tokens = list(answer.tokens)
        known = [*self.pictures, *(one for one in pictures if one not in self.pictures)]
        # If two pictures may be at one place, it is unknown which one is there, so it is sent again.
        self.pictures = tuple(
            one
            for one in known
            if one.end <= len(self.tokens)
            and not any(other.start < one.end and one.start < other.end for other in known if other is not one)
        )

    async def close(self) -> None:
        request = messages.CloseSessionRequest(session_id=self.session_id)
        await self._client.stub.CloseSession(request, metadata=self._client.metadata)

    def _call(self, tokens: Sequence[int], pictures: Sequence[Picture], fields: dict[str, Any]) -> Any:
        matched = self._matched(tokens, pictures)
        request = messages.GenerateRequest(
            session_id=self.session_id,
            append_tokens=tokens[matched:],
            offset=matched,
            truncating=matched < len(self.tokens),
            images=[
                messages.ImageAttachment(
                    bytes=one.data, mime=one.mime, pad_range_start=one.start, pad_range_end=one.end
                )
                for one in pictures
                if one.start >= matched
            ],
            **fields,
        )
        return self._client.stub.Generate(request, metadata=self._client.metadata)

    def _matched(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> int:
        """Length of the part of the server's list that can stay: up to the first different token or picture."""
        matched = common_prefix(self.tokens, tokens)
        for one in sorted({*self.pictures, *pictures}, key=lambda one: -one.start):
            is_kept = one in self.pictures and one in pictures and one.end <= matched
            if not is_kept and one.start < matched:
                matched = one.start
        return matched

    async def _after_cancel(self, pictures: Sequence[Picture]) -> None:
        """Waits until the server has noticed the cancel; a list that is still longer is corrected by the next call."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.synchronise(pictures)


class SalienceClient:
    """Client of the service. All sessions share one ``channel``."""

    def __init__(self, channel: grpc.aio.Channel, *, api_key: str | None = None) -> None:
        self.stub: Any = SalienceStub(channel)
        self.metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    @asynccontextmanager
    async def session(self, model: str = "local-model") -> AsyncIterator[Session]:
        """Context manager of a new session."""
        answer = await self.stub.OpenSession(messages.OpenSessionRequest(model=model), metadata=self.metadata)
        session = Session(self, answer.session_id, answer.max_model_len)
        try:
            yield session
        finally:
            await session.close()

    async def manifest(self) -> messages.ReadoutManifest:
        """Returns the meaning of readouts; it has no concepts if the server has none."""
        found: messages.ReadoutManifest = await self.stub.GetReadoutManifest(
            messages.GetReadoutManifestRequest(), metadata=self.metadata
        )
        return found


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix. Bisects, since each call compares lists of hundreds of thousands of tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _retry_after(error: grpc.aio.AioRpcError) -> float:
    told = dict(tuple(error.trailing_metadata() or ()))
    return int(told.get("retry-after-ms", 0)) / 1000


# the program


def main() -> int:
    options = parse_arguments()
    try:
        vocabulary = load_vocabulary(options.tokenizer)
        tokens = [int(one) for one in options.prompt_ids.split(",")] if options.prompt_ids else None
        tokens = vocabulary.encode(options.prompt) if tokens is None else tokens
    except (OSError, ValueError, ImportError) as error:
        return complain(error, USAGE)
    try:
        asyncio.run(run(options, vocabulary, tokens))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError) as error:
        return complain(error, USAGE)
    except grpc.aio.AioRpcError as error:
        return complain(f"{error.code().name}: {error.details()}", FAILED)
    return 0


async def run(options: argparse.Namespace, vocabulary: Vocabulary, tokens: list[int]) -> None:
    async with connect(options) as channel:
        client = SalienceClient(channel, api_key=options.api_key)
        async with client.session(options.model) as session:
            if options.score:
                (score,) = await session.score(tokens, [(0, len(tokens))])
                print(f"log-probability {score:.4f} ({score / max(1, len(tokens) - 1):.4f} a token)")
                return
            manifest = await client.manifest()
            trace = make_trace(vocabulary, manifest.concepts, manifest.layers, layer=options.layer)
            await show(session, tokens, options, trace, reading=bool(manifest.concepts))


async def show(
    session: Session, tokens: list[int], options: argparse.Namespace, trace: Trace, *, reading: bool
) -> None:
    events = session.generate(
        tokens,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        logprobs_ranges=[EVERYWHERE],
        readout_ranges=[EVERYWHERE] if reading else [],
    )
    async for event in events:
        if event.WhichOneof("event") == "token":
            trace.token(event.token)
        else:
            reason = messages.GenerateDone.FinishReason.Name(event.done.finish_reason).removeprefix("FINISH_REASON_")
            print(f"{event.done.prompt_tokens} + {event.done.completion_tokens} tokens, {reason.lower()}")


def connect(options: argparse.Namespace) -> grpc.aio.Channel:
    # Dumps of long sessions exceed gRPC's default limit.
    limits = [("grpc.max_receive_message_length", -1)]
    if options.tls_ca is None:
        return grpc.aio.insecure_channel(options.address, options=limits)
    credentials = grpc.ssl_channel_credentials(options.tls_ca.read_bytes())
    return grpc.aio.secure_channel(options.address, credentials, options=limits)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="needs a --tokenizer")
    prompt.add_argument("--prompt-ids", metavar="N,N,…", help="the prompt as token ids")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the model's; 'bytes' where a token is a byte")
    parser.add_argument("--address", default="127.0.0.1:50051", help="[127.0.0.1:50051]")
    parser.add_argument("--model", default="local-model", help="the model that has to be served there")
    parser.add_argument("--api-key", default=os.environ.get("OMNI_WS_API_KEY"), help="[$OMNI_WS_API_KEY]")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE.pem", help="speak TLS, and trust this certificate")
    parser.add_argument("--max-tokens", type=int, default=40, help="[40]")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 means 1.0")
    parser.add_argument("--top-k", type=int, default=0, help="1: the likeliest token each time")
    parser.add_argument("--layer", type=int, help="whose readouts are shown [the last of the manifest]")
    parser.add_argument("--score", action="store_true", help="print the likelihood of the prompt and exit")
    return parser.parse_args()


def complain(problem: object, status: int) -> int:
    print(f"salience_client: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
