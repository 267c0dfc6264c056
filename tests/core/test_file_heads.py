"""What a file is by its first bytes."""

from __future__ import annotations

import pytest

from omni_ws.core.file_heads import FileKind, kind_of_head


@pytest.mark.parametrize(("version", "kind"), [(1, None), (2, FileKind.MP3), (4, FileKind.MP3), (5, None)])
def test_a_tag_of_a_known_version_leads_to_music(version: int, kind: FileKind | None) -> None:
    tag = b"ID3" + bytes([version, 0, 0, 0, 0, 0, 2]) + b".."
    assert kind_of_head(tag + b"\xff\xfb\x90\0", final=True) is kind
