"""What the package hibari-tts reads text with, its dictionaries packed: 12 MB of memory instead of 80."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from omni_ws.audio.vad import OnnxNetwork, runtime_library
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
    g2p.british, g2p.unk, g2p._oov = british, "", _UnknownWords("oov_gb.onnx" if british else "oov.onnx")
    return g2p


class _UnknownWords:
    """Pronounces words that no dictionary has, by a network of the package, which the first of them loads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._network: OnnxNetwork | None = None
        self._pronounce: Any = None

    def __call__(self, word: str) -> str | None:
        if self._network is None:
            from hibari.g2p.oov import OOV

            file = str(resources.files("hibari") / "assets" / self._name)
            self._network = OnnxNetwork(runtime_library(), Path(file))
            self._pronounce = OOV(file, session=self)
        phonemes: str | None = self._pronounce(word)
        return phonemes

    def run(self, _: None, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """What the package calls of its own runtime."""
        assert self._network is not None
        return self._network.computed(["ids"], inputs)


def _asset(name: str) -> bytes:
    return (resources.files("hibari") / "assets" / name).read_bytes()


def _unzipped(name: str) -> bytes:
    return gzip.decompress(_asset(name))
