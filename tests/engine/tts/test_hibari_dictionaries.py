"""The packed dictionaries of hibari: the same as the package's own."""

from __future__ import annotations

import pytest

pytest.importorskip("hibari")

from omni_ws.engine.tts.hibari_dictionaries import hibari_g2p

pytestmark = pytest.mark.slow  # dictionaries of 270,000 entries, in both forms


@pytest.mark.parametrize("british", [False, True])
def test_every_entry_and_every_setting_is_the_packages_own(british: bool) -> None:
    from hibari.g2p import G2P

    own, ours = G2P(british=british), hibari_g2p(british=british)
    for packed, entries in (
        (ours.lexicon.golds.d, own.lexicon.golds.d),
        (ours.lexicon.silvers.d, own.lexicon.silvers.d),
        (ours.tagger.weights, own.tagger.weights),
    ):
        assert [name for name, value in entries.items() if packed.get(name) != value] == []
        assert packed.get("nosuchword") is None
    assert vars(ours).keys() == vars(own).keys()
    assert vars(ours.lexicon).keys() == vars(own.lexicon).keys()
    assert (ours.tagger.tagdict, ours.tagger.tags, ours.tagger.vocab) == (
        own.tagger.tagdict,
        own.tagger.tags,
        own.tagger.vocab,
    )


@pytest.mark.parametrize("british", [False, True])
def test_sentences_are_pronounced_as_by_the_package(british: bool) -> None:
    from hibari.g2p import G2P

    own, ours = G2P(british=british), hibari_g2p(british=british)
    for text in (
        "I read it, the record, in Reading; 'why?' she used to ask.",
        "Schedule the Wednesday refactoring of zyzzyvas, McDonald's 42nd O'Reilly book costs $3.50.",
        "Blorptastic quuxification, said Mxyzptlk the Snorgle.",
        "The lead singer's tears live on; we live in the present, and present it.",
    ):
        assert ours(text) == own(text)
