"""What the package hibari-tts reads text with, its dictionaries packed: 12 MB of memory instead of 80."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from typing import Any, Final

from omni_ws.engine.tts.packed_entries import PackedEntries

#: The last part of the tagger's file, and by far the largest.
_WEIGHTS: Final = b',"weights":'


def hibari_g2p(*, british: bool = False) -> Any:
    """Return the package's ``G2P``, which pronounces the same."""
    from hibari.g2p import G2P
    from hibari.g2p.lexicon import Lexicon
    from hibari.g2p.tagger import Tagger
    from hibari.g2p.tokenize import Tokenizer

    # Its constructor would read the same files, into dicts.
    g2p = G2P.__new__(G2P)
    accent = "gb" if british else "us"
    gold, silver = (PackedEntries(_unzipped(f"lexicon_{accent}_{part}.json.gz")) for part in ("gold", "silver"))
    g2p.lexicon = Lexicon(gold, silver, british)
    g2p.tokenizer = Tokenizer(json.loads(_asset("tokenizer_exceptions.json")))
    tagger, _, weights = _unzipped("tagger.json.gz").partition(_WEIGHTS)
    g2p.tagger = Tagger({**json.loads(tagger + b"}"), "weights": PackedEntries(weights)})
    g2p.british, g2p.unk, g2p._oov = british, "", None
    return g2p


def _asset(name: str) -> bytes:
    return (resources.files("hibari") / "assets" / name).read_bytes()


def _unzipped(name: str) -> bytes:
    return gzip.decompress(_asset(name))
