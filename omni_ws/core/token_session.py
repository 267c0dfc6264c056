"""TokenSession: a list of token ids with images in it, changed only where the client knows what it changes.

No clock, no lock and no engine: whoever owns a session makes sure that one append is under way at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omni_ws.errors import ContextLengthExceeded, InvalidValue, OffsetMismatch

#: Of unsigned 32-bit integers: what a token id is on the wire.
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """The tokens of a vision block: one start, a pad for each feature of the image, one end."""

    start: int
    pad: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenImage:
    """An image and the place [start, end) of its vision block. Shared by a session and its forks."""

    data: bytes
    mime: str
    start: int
    end: int

    @property
    def features(self) -> int:
        """How many pads the block has."""
        return self.end - self.start - 2


class TokenSession:
    """``max_length`` is the longest list in tokens, ``vocabulary`` the number of token ids.

    ``vision`` is None where the model sees nothing.
    """

    def __init__(self, *, max_length: int, vocabulary: int, vision: VisionTokens | None = None) -> None:
        self.max_length = max_length
        self.vocabulary = vocabulary
        self.vision = vision
        self.tokens = array("I")
        #: In the order of their places.
        self.images: tuple[TokenImage, ...] = ()
        self._append: TokenAppend | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def committed(self) -> array[int]:
        """A copy of the list, without an append that may still be taken back."""
        append = self._append
        return self.tokens[:] if append is None else self.tokens[: append.offset] + append.cut

    def begin(
        self, tokens: Sequence[int], *, offset: int, truncating: bool = False, images: Iterable[TokenImage] = ()
    ) -> TokenAppend:
        """Put ``tokens`` at ``offset``, to be confirmed by ``commit`` or taken back by ``rollback``.

        Raises OffsetMismatch for a wrong offset or one inside an image, ContextLengthExceeded, and InvalidValue for
        tokens and images that cannot be; nothing is changed then.
        """
        if self._append is not None:
            raise RuntimeError("an append is under way")
        kept = self._check_offset(offset, truncating)
        # Before they are looked at: there may be millions.
        if offset + len(tokens) > self.max_length:
            raise ContextLengthExceeded(
                f"{offset + len(tokens)} tokens are more than the {self.max_length} that the model reads"
            )
        new = array("I", tokens)
        if new and max(new) >= self.vocabulary:
            raise InvalidValue(f"token ids are below {self.vocabulary}", param="append_tokens")
        added = tuple(sorted(images, key=lambda image: image.start))
        self._check_images(new, offset, added)
        append = TokenAppend(self, offset=offset, cut=self.tokens[offset:], images_before=self.images)
        del self.tokens[offset:]
        self.tokens += new
        self.images = (*kept, *added)
        self._append = append
        return append

    def decoded(self, token: int) -> None:
        """A token that the model wrote."""
        self.tokens.append(token)

    def fork(self, at: int) -> TokenSession:
        """A session with the first ``at`` tokens and the images within them.

        Raises InvalidValue beyond the end and OffsetMismatch inside an image.
        """
        if at > len(self.tokens):
            raise InvalidValue(f"position {at} is beyond the end, {len(self.tokens)}", param="at_position")
        child = TokenSession(max_length=self.max_length, vocabulary=self.vocabulary, vision=self.vision)
        child.images = self._images_before(at)
        child.tokens = self.tokens[:at]
        return child

    def _check_offset(self, offset: int, truncating: bool) -> tuple[TokenImage, ...]:
        length = len(self.tokens)
        if offset > length or (offset < length and not truncating):
            raise OffsetMismatch(f"the session has {length} tokens, not {offset}", param="offset")
        return self._images_before(offset)

    def _images_before(self, position: int) -> tuple[TokenImage, ...]:
        for image in self.images:
            if image.start < position < image.end:
                raise OffsetMismatch(
                    f"position {position} is inside the image of [{image.start}, {image.end})", param="offset"
                )
        return tuple(image for image in self.images if image.end <= position)

    def _check_images(self, new: array[int], offset: int, images: tuple[TokenImage, ...]) -> None:
        """Every vision block of ``new`` has its image, every image its block."""
        vision = self.vision
        if vision is None:
            if images:
                raise InvalidValue("this model sees no images", param="images")
            return
        free = offset
        for image in images:
            place = f"[{image.start}, {image.end})"
            if image.start < free or image.end > offset + len(new):
                raise InvalidValue(f"the range {place} is not within what is appended, or overlaps", param="images")
            block = new[image.start - offset : image.end - offset]
            if len(block) < 3 or block[0] != vision.start or block[-1] != vision.end:
                raise InvalidValue(f"there is no vision block at {place}", param="images")
            if block.count(vision.pad) != image.features:
                raise InvalidValue(f"the vision block at {place} holds other tokens than pads", param="images")
            free = image.end
        pads = sum(image.features for image in images)
        if (new.count(vision.start), new.count(vision.pad), new.count(vision.end)) != (len(images), pads, len(images)):
            raise InvalidValue("every vision block in append_tokens needs an image, and no other", param="images")


@dataclass(slots=True, eq=False)
class TokenAppend:
    """An append that was made and not confirmed. ``commit`` and ``rollback`` are idempotent, the first one counts."""

    session: TokenSession
    offset: int
    #: What a truncation cut away.
    cut: array[int]
    images_before: tuple[TokenImage, ...]

    @property
    def pending(self) -> bool:
        return self.session._append is self

    def commit(self) -> None:
        if self.pending:
            self.session._append = None

    def rollback(self) -> None:
        if self.pending:
            session = self.session
            del session.tokens[self.offset :]
            session.tokens += self.cut
            session.images = self.images_before
            session._append = None
