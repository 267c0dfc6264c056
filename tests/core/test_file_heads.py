"""What a file is by its first bytes."""

from __future__ import annotations

import pytest

from omni_ws.core.file_heads import FileKind, kind_of_head


@pytest.mark.parametrize(("version", "kind"), [(1, None), (2, FileKind.MP3), (4, FileKind.MP3), (5, None)])
def test_a_tag_of_a_known_version_leads_to_music(version: int, kind: FileKind | None) -> None:
    tag = b"ID3" + bytes([version, 0, 0, 0, 0, 0, 2]) + b".."
    assert kind_of_head(tag + b"\xff\xfb\x90\0", final=True) is kind


@pytest.mark.parametrize(("flags", "footer"), [(0, b""), (0x10, b"3DI" + bytes(7))])
def test_a_file_begins_behind_its_tag_and_the_footer_of_that(flags: int, footer: bytes) -> None:
    tag = b"ID3\4\0" + bytes([flags, 0, 0, 0, 2]) + b".." + footer
    assert kind_of_head(tag + b"fLaC" + bytes(8), final=True) is FileKind.FLAC
