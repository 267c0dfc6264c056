"""Plain words: what somebody wrote or was heard to say, in one spelling, and without courtesies around it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

_QUOTES: Final = str.maketrans("’‘ʼ`´", "'''''")
_SIGNS: Final = re.compile(r"°\s?[cf]\b|[%°&]")
_SIGN_WORDS: Final = {"%": " percent ", "°": " degrees ", "&": " and ", "°c": " celsius ", "°f": " fahrenheit "}
_MINUS: Final = re.compile(r"(?<![\w)])[-−](?=\d)")
_IS: Final = re.compile(
    r"\b(what|who|where|when|why|how|it|that|there|here|he|she|name|time|weather|everything|"
    r"life|birthday|color|favourite|favorite)'s\b"
)
_CONTRACTED: Final = re.compile(r"\bwon't\b|\bcan't\b|\blet's\b|n't\b|'re\b|'ve\b|'ll\b|'m\b|'d\b")
_FULL: Final = {
    "won't": "will not", "can't": "can not", "let's": "let us", "n't": " not",
    "'re": " are", "'ve": " have", "'ll": " will", "'m": " am", "'d": " would",
}  # fmt: skip
_TOKEN: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d_]+(?:'[^\W\d_]+)*")

#: One spelling for words that have several, and for those that are written as they are said.
_SPELLINGS: Final = {
    "whats": "what is", "whos": "who is", "wheres": "where is", "hows": "how is", "thats": "that is", "im": "i am",
    "ive": "i have", "dont": "do not", "cant": "can not", "cannot": "can not", "isnt": "is not", "arent": "are not",
    "didnt": "did not", "doesnt": "does not", "youre": "you are", "theres": "there is", "lets": "let us",
    "ya": "you", "u": "you", "ur": "your", "wanna": "want to", "gonna": "going to", "gotta": "got to",
    "gimme": "give me", "lemme": "let me", "ok": "okay", "k": "okay", "yeah": "yes", "yep": "yes", "yup": "yes",
    "nope": "no", "nah": "no", "thanx": "thanks", "thx": "thanks", "goodbye": "good bye", "alright": "all right",
    "favourite": "favorite", "colour": "color", "colours": "colors", "grey": "gray", "mum": "mom",
    "metre": "meter", "metres": "meters", "kilometre": "kilometer", "kilometres": "kilometers", "litre": "liter",
    "litres": "liters", "centimetre": "centimeter", "centimetres": "centimeters", "mr": "mister",
    "dr": "doctor", "somebody": "someone", "everybody": "everyone", "anybody": "anyone", "tv": "television",
}  # fmt: skip

#: What may stand before a request, or alone. The longest comes first.
_BEFORE: Final = (
    "okay google|hey google|hey siri|hey alexa|siri|alexa|would you be so kind and|do you happen to know|is it "
    "possible to|i would like you to|i would like to know|i would like to hear|can you please|could you please|"
    "would you please|will you please|would you mind|i want you to|i want to know|i want to hear|i would like|can "
    "you tell|are you able to|let me know|let me hear|do you know|do you have|have you got|can i hear|how about|"
    "tell us|read me|good afternoon|good morning|good evening|excuse me|thank you|tell me|give me|can you|could you|"
    "would you|will you|may i ask|i said|go on and|my friend|all right|i want|please|hello|thanks|okay|sorry|well|"
    "great|cool|nice|good|then|just|also|hmm|hey|and|but|now|yes|umm|uhm|hi|oh|ah|um|uh|er|hm|so|no|computer|"
    "assistant|robot|omni|there|again|actually|listen|i think that|i think|"
    # "Um" is heard as "I'm".
    "i am(?= (?:who|what|where|when|why|how|can|could|tell|do|hello|hi|hey)\\b)"
)
#: What may stand behind a request.
_BEHIND: Final = (
    "if you can|if you please|my dear|dear|sir|madam|darling|honey|sweetheart|mate|bro|pal|if you do not mind|thank "
    "you very much|thank you|right now|my friend|for me|please|"
    "thanks|computer|assistant|robot|omni|today|buddy|dude|then|now|man|again|will you|would you|can you|okay|"
    "(?:do you|can you|if you|you do|did you) (?:still |even )?(?:know|remember|recall)|(?:can|could|would|will) you "
    "(?:please )?tell me|do you have any idea|any idea|any ideas"
)
_LEADING: Final = re.compile(rf"^(?:{_BEFORE}) (?=.)")
_TRAILING: Final = re.compile(rf"(?<=.) (?:{_BEHIND})$")
#: Courtesies that are taken away at most, before and behind.
_MOST_COURTESIES: Final = 6


def listed(words: str) -> tuple[str, ...]:
    """The words of a list that is written as a sentence."""
    return tuple(words.split())


def plain_words(text: str) -> str:
    """``text`` in small letters, without punctuation and contractions, a space between words: "what's" → "what is"."""
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES).lower()
    text = _MINUS.sub(" minus ", text)
    text = _SIGNS.sub(lambda sign: _SIGN_WORDS[sign[0].replace(" ", "")], text)
    text = _CONTRACTED.sub(lambda found: _FULL[found[0]], _IS.sub(r"\1 is", text))
    return " ".join(_SPELLINGS.get(word, word) for word in _TOKEN.findall(text))


def requests(words: str) -> Iterator[str]:
    """Yield plain ``words``, and what is left of them with fewer and fewer courtesies; what has none comes last."""
    yield words
    yield from _stripped(_LEADING, words)
    for shorter in _stripped(_TRAILING, words):
        yield shorter
        words = shorter
    yield from _stripped(_LEADING, words)


def _stripped(courtesy: re.Pattern[str], words: str) -> Iterator[str]:
    """Yield ``words`` without the first courtesy, without the second one too, and so on."""
    for _ in range(_MOST_COURTESIES):
        shorter = courtesy.sub("", words, count=1)
        if shorter == words:
            return
        yield shorter
        words = shorter
