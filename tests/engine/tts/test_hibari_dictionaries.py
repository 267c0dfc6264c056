"""The packed dictionaries of hibari: the same as the package's own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

pytest.importorskip("hibari")

from omni_ws.engine.tts.neural import hibari_g2p

pytestmark = pytest.mark.slow  # dictionaries of 270,000 entries, in both forms


#: Of so many entries one is looked at, others for each dialect.
STRIDE = 7


@pytest.fixture(scope="module", params=[False, True], ids=["american", "british"])
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The package's own, and ours."""
    from hibari.g2p import G2P

    return G2P(british=request.param), hibari_g2p(british=request.param)


def test_the_entries_and_every_setting_are_the_packages_own(both: tuple[Any, Any]) -> None:
    own, ours = both
    first = int(own.british)
    for packed, entries in (
        (ours.lexicon.golds.d, own.lexicon.golds.d),
        (ours.lexicon.silvers.d, own.lexicon.silvers.d),
        (ours.tagger.weights, own.tagger.weights),
    ):
        looked_at = islice(entries.items(), first, None, STRIDE)
        assert [name for name, value in looked_at if packed.get(name) != value] == []
        assert packed.get("nosuchword") is None
    assert vars(ours).keys() == vars(own).keys()
    assert vars(ours.lexicon).keys() == vars(own.lexicon).keys()
    assert (ours.tagger.tagdict, ours.tagger.tags, ours.tagger.vocab) == (
        own.tagger.tagdict,
        own.tagger.tags,
        own.tagger.vocab,
    )


def test_sentences_are_pronounced_as_by_the_package(both: tuple[Any, Any]) -> None:
    own, ours = both
    for text in (
        "I read it, the record, in Reading; 'why?' she used to ask.",
        "Schedule the Wednesday refactoring of zyzzyvas, McDonald's 42nd O'Reilly book costs $3.50.",
        "Blorptastic quuxification, said Mxyzptlk the Snorgle.",
        "The lead singer's tears live on; we live in the present, and present it.",
    ):
        assert ours(text) == own(text)
