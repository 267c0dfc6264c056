"""The languages that multilingual Whisper can be told to expect, and their English names.

Sources: RFC 5646 for the codes; openai-whisper's ``tokenizer.py`` for the list, which its clients know by these names.
"""

from __future__ import annotations

from typing import Final

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
    """The English name of a language in lower case; the code itself where it is none of these."""
    return _NAME_OF.get(code, code)


def language_code(name: str) -> str:
    """The code of a language by its English name in any case; what is no such name comes back as it is."""
    return _CODE_OF.get(" ".join(name.lower().split()), name)
