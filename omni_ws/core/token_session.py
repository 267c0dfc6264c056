"""Token sessions: lists of token IDs with images, which a client edits at explicit offsets.

TokenSession is pure data without lock, clock or engine; its owner serialises the appends.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from omni_ws.errors import ContextLengthExceeded, InvalidValue, OffsetMismatch

#: Bytes per token: an ID is an unsigned 32-bit integer, on the wire and in the list.
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """The token IDs that make up a vision block: one ``start``, one ``pad`` for each image feature, one ``end``."""

    start: int
    pad: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenImage:
    """An image, and the range [start, end) of its vision block in the list. Forks of a session share it."""

    data: bytes
    mime: str
    start: int
    end: int

    @property
    def features(self) -> int:
        """The number of ``pad`` tokens in the block, one for each image feature."""
        return self.end - self.start - 2


class TokenSession:
    """The token list of a session.

    An append changes the list immediately, but stays pending until it is committed: the engine may still refuse it, and
    ``rollback`` then restores the list, with the tokens that a truncating append cut off.

    ``max_length`` is the most tokens that the list may have, ``vocabulary`` the number of token IDs, ``vision`` None
    for models without images. The list begins with ``tokens``, among which are the vision blocks of ``images``.
    """

    def __init__(
        self,
        *,
        max_length: int,
        vocabulary: int,
        vision: VisionTokens | None = None,
        tokens: array[int] | None = None,
        images: tuple[TokenImage, ...] = (),
    ) -> None:
        self.max_length = max_length
        self.vocabulary = vocabulary
        self.vision = vision
        self.tokens = array("I") if tokens is None else tokens
        #: Sorted by position.
        self.images = images
        #: The state before a pending append: its offset, the tokens that it cut off, and the images.
        self._before: tuple[int, array[int], tuple[TokenImage, ...]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def committed(self) -> array[int]:
        """Return a copy of the list, without a pending append."""
        if self._before is None:
            return self.tokens[:]
        offset, cut, _ = self._before
        return self.tokens[:offset] + cut

    def begin(
        self, tokens: Sequence[int], *, offset: int, truncating: bool = False, images: Iterable[TokenImage] = ()
    ) -> None:
        """Append ``tokens`` at ``offset``, pending until ``commit`` or ``rollback``.

        ``offset`` has to be the length of the list or, with ``truncating``, at most that: the list is cut off there
        first. ``images`` are those whose vision blocks are in ``tokens``.

        Raises OffsetMismatch for a wrong offset or one inside an image, ContextLengthExceeded for a list that becomes
        too long, and InvalidValue for unknown token IDs and for images that do not match the vision blocks. The list is
        unchanged then. Raises RuntimeError while another append is pending.
        """
        if self.pending:
            raise RuntimeError("an append is in progress")
        kept = self._check_offset(offset, truncating)
        # The cheap check first: there may be millions of tokens.
        if offset + len(tokens) > self.max_length:
            raise ContextLengthExceeded(
                f"at most {self.max_length} tokens fit into the model's context, got {offset + len(tokens)}"
            )
        new = array("I", tokens)
        if new and max(new) >= self.vocabulary:
            raise InvalidValue(f"token ids must be less than {self.vocabulary}", param="append_tokens")
        added = tuple(sorted(images, key=lambda image: image.start))
        self._check_images(new, offset, added)
        self._before = offset, self.tokens[offset:], self.images
        del self.tokens[offset:]
        self.tokens += new
        self.images = (*kept, *added)

    def decoded(self, token: int) -> None:
        """Append a token that the model generated."""
        self.tokens.append(token)

    def fork(self, at: int) -> TokenSession:
        """Return a new session with the first ``at`` tokens and the images among them.

        Raises InvalidValue if ``at`` exceeds the length, and OffsetMismatch if it is inside an image.
        """
        if at > len(self.tokens):
            raise InvalidValue(
                f"position {at} is after the end of the session, {len(self.tokens)}", param="at_position"
            )
        return TokenSession(
            max_length=self.max_length,
            vocabulary=self.vocabulary,
            vision=self.vision,
            tokens=self.tokens[:at],
            images=self._images_before(at),
        )

    @property
    def pending(self) -> bool:
        """Whether an append is neither committed nor rolled back."""
        return self._before is not None

    def commit(self) -> None:
        """Make the pending append final, if there is one."""
        self._before = None

    def rollback(self) -> None:
        """Undo the pending append, if there is one."""
        before, self._before = self._before, None
        if before is not None:
            offset, cut, self.images = before
            del self.tokens[offset:]
            self.tokens += cut

    def _check_offset(self, offset: int, truncating: bool) -> tuple[TokenImage, ...]:
        """Check ``offset`` and return the images before it."""
        length = len(self.tokens)
        if offset > length or (offset < length and not truncating):
            raise OffsetMismatch(f"the session has {length} tokens, not {offset}", param="offset")
        return self._images_before(offset)

    def _images_before(self, position: int) -> tuple[TokenImage, ...]:
        """Return the images that end at or before ``position``. Raises OffsetMismatch if it is inside an image."""
        for image in self.images:
            if image.start < position < image.end:
                raise OffsetMismatch(
                    f"position {position} is inside the image at [{image.start}, {image.end})", param="offset"
                )
        return tuple(image for image in self.images if image.end <= position)

    def _check_images(self, new: array[int], offset: int, images: tuple[TokenImage, ...]) -> None:
        """Check that the vision blocks in ``new`` and the images correspond one to one."""
        vision = self.vision
        if vision is None:
            if images:
                raise InvalidValue("images are not supported by this model", param="images")
            return
        free = offset
        for image in images:
            place = f"[{image.start}, {image.end})"
            if image.start < free or image.end > offset + len(new):
                raise InvalidValue(
                    f"the range {place} is outside the appended tokens, or overlaps another", param="images"
                )
            block = new[image.start - offset : image.end - offset]
            if len(block) < 3 or block[0] != vision.start or block[-1] != vision.end:
                raise InvalidValue(f"no vision block at {place}", param="images")
            if block.count(vision.pad) != image.features:
                raise InvalidValue(f"the vision block at {place} must contain only pad tokens", param="images")
            free = image.end
        pads = sum(image.features for image in images)
        if (new.count(vision.start), new.count(vision.pad), new.count(vision.end)) != (len(images), pads, len(images)):
            raise InvalidValue("append_tokens must have exactly one vision block per image", param="images")


class TokenRanges:
    """A set of token positions, given as ranges [start, end), which may overlap, touch or be empty.

    Raises InvalidValue, naming ``param`` and the index of the range, for a range that ends before its start.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), *, param: str | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        given = list(ranges)
        for index, (start, end) in enumerate(given):
            if start > end:
                raise InvalidValue(
                    f"the end of a range ({end}) must not be less than its start ({start})",
                    param=param and f"{param}[{index}]",
                )
        for start, end in sorted(one for one in given if one[0] < one[1]):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, position: int) -> bool:
        place = bisect_right(self._starts, position) - 1
        return place >= 0 and position < self._ends[place]

    @property
    def first(self) -> int | None:
        """The lowest position, or None for an empty set."""
        return self._starts[0] if self._starts else None

    def pairs(self) -> list[tuple[int, int]]:
        """Return the union as sorted ranges that neither touch nor overlap."""
        return list(zip(self._starts, self._ends, strict=True))

    def below(self, limit: int) -> Iterator[int]:
        """Yield the positions below ``limit`` in ascending order."""
        for start, end in zip(self._starts, self._ends, strict=True):
            if start >= limit:
                return
            yield from range(start, min(end, limit))

    def reaches(self, limit: int) -> bool:
        """Whether the set contains a position at or after ``limit``."""
        return bool(self._ends) and self._ends[-1] > limit
