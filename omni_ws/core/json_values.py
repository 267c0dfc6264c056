"""Checks of clients' input: how many values a JSON document has, and names and codes of languages."""

from __future__ import annotations

from typing import Any, Final

import orjson

from omni_ws.errors import InvalidFrame

# The number of values.

#: The most values of a message or a line, which are parsed on the event loop, and of a body, which is not.
MAX_MESSAGE_VALUES: Final = 50_000
MAX_BODY_VALUES: Final = 1_000_000
#: The number of values that an array or an object counts as.
_CONTAINER: Final = 4
#: The bytes of text that are examined at once.
_BLOCK: Final = 1 << 20
_QUOTE, _COMMA, _ARRAY, _OBJECT = b'",[{'


def check_values(data: bytes | bytearray | memoryview | str, most: int = MAX_MESSAGE_VALUES) -> None:
    """Raise InvalidFrame if a document has more than ``most`` values; an array or an object counts as four.

    Syntax errors are left to the parser.

    The check runs before the document is parsed. A parser makes an object of every value: two bytes of text may become
    a hundred of memory, and it holds the interpreter's lock meanwhile, whichever thread it is in. The check is linear
    in the length of the text. Characters in strings do not count.
    """
    if _CONTAINER * len(data) < most:
        return
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    if text.count(b",") + _CONTAINER * (text.count(b"[") + text.count(b"{")) < most:
        return
    import numpy as np  # for the few documents that get here: clients import this module

    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, in_string = 1, False
    for start in range(0, len(text), _BLOCK):
        codes = np.frombuffer(text, np.uint8, min(_BLOCK, len(text) - start), start)
        # Odd inside a string: an odd number of quotes precedes.
        quotes = np.bitwise_xor.accumulate(codes == _QUOTE)
        outside = codes[quotes == in_string]
        in_string ^= bool(quotes[-1])
        values += int(np.count_nonzero(outside == _COMMA))
        values += _CONTAINER * int(np.count_nonzero((outside == _ARRAY) | (outside == _OBJECT)))
        if values > most:
            raise InvalidFrame(f"the JSON has more than {most} values")


def json_or_none(data: bytes | bytearray | str, most: int = MAX_MESSAGE_VALUES) -> Any:
    """Parse a JSON document; return None if it is not JSON, or has more than ``most`` values."""
    try:
        check_values(data, most)
        return orjson.loads(data)
    except (InvalidFrame, ValueError):
        return None


# The languages that multilingual Whisper can be told to expect. Sources: RFC 5646 for the codes; openai-whisper's
# ``tokenizer.py`` for the list and the English names, which its clients know.

_NAMES: Final = (
    "af Afrikaans,am Amharic,ar Arabic,as Assamese,az Azerbaijani,ba Bashkir,be Belarusian,bg Bulgarian,bn Bengali,"
    "bo Tibetan,br Breton,bs Bosnian,ca Catalan,cs Czech,cy Welsh,da Danish,de German,el Greek,en English,es Spanish,"
    "et Estonian,eu Basque,fa Persian,fi Finnish,fo Faroese,fr French,gl Galician,gu Gujarati,ha Hausa,haw Hawaiian,"
    "he Hebrew,hi Hindi,hr Croatian,ht Haitian Creole,hu Hungarian,hy Armenian,id Indonesian,is Icelandic,it Italian,"
    "ja Japanese,jw Javanese,ka Georgian,kk Kazakh,km Khmer,kn Kannada,ko Korean,la Latin,lb Luxembourgish,ln Lingala,"
    "lo Lao,lt Lithuanian,lv Latvian,mg Malagasy,mi Maori,mk Macedonian,ml Malayalam,mn Mongolian,mr Marathi,ms Malay,"
    "mt Maltese,my Myanmar,ne Nepali,nl Dutch,nn Nynorsk,no Norwegian,oc Occitan,pa Punjabi,pl Polish,ps Pashto,"
    "pt Portuguese,ro Romanian,ru Russian,sa Sanskrit,sd Sindhi,si Sinhala,sk Slovak,sl Slovenian,sn Shona,so Somali,"
    "sq Albanian,sr Serbian,su Sundanese,sv Swedish,sw Swahili,ta Tamil,te Telugu,tg Tajik,th Thai,tk Turkmen,"
    "tl Tagalog,tr Turkish,tt Tatar,uk Ukrainian,ur Urdu,uz Uzbek,vi Vietnamese,yi Yiddish,yo Yoruba,yue Cantonese,"
    "zh Chinese"
)
_NAME_OF: Final[dict[str, str]] = {
    code: name.lower() for code, _, name in (one.partition(" ") for one in _NAMES.split(","))
}
#: Further names of the same languages.
_CODE_OF: Final[dict[str, str]] = {name: code for code, name in _NAME_OF.items()} | {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
    "filipino": "tl",
    "farsi": "fa",
}
WHISPER_LANGUAGES: Final = tuple(_NAME_OF)


def language_name(code: str) -> str:
    """Return the English name of a language in lower case; an unknown code is returned unchanged."""
    return _NAME_OF.get(code, code)


def language_code(name: str) -> str:
    """Return the code of a language by its English name, in any case; an unknown name is returned unchanged."""
    return _CODE_OF.get(" ".join(name.lower().split()), name)


def primary_subtag(language: str) -> str:
    """Return the primary subtag of a language tag (RFC 5646) in small letters: ``de`` of ``de-AT``."""
    return language.lower().partition("-")[0]
