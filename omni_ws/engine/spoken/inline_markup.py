"""InlineMarkup: takes the markup out of the words of a text, one at a time."""

from __future__ import annotations

import html
import re
import unicodedata
from enum import Enum
from typing import Final

#: Tags that a model writes. Others, such as a type in angle brackets, are text.
_TAG_NAMES: Final = (
    "a|abbr|b|big|blockquote|br|button|center|cite|code|dd|del|details|div|dl|dt|em|figcaption|figure|font|form|h[1-6]|hr|"
    "i|iframe|img|input|ins|kbd|label|li|mark|ol|p|pre|q|s|samp|script|section|small|source|span|strike|strong|style|sub|"
    "summary|sup|table|tbody|td|th|thead|tr|tt|u|ul|var|video|audio"
)
_TAG: Final = re.compile(rf"</?(?:{_TAG_NAMES})(?:/?|\s[^<>]*)>", re.IGNORECASE)
_BREAK: Final = re.compile(r"<br ?/?>", re.IGNORECASE)
_OPEN_TAG: Final = re.compile(
    r"<(?:a|br|button|code|details|div|font|h[1-6]|hr|iframe|img|input|label|li|ol|p|pre|source|span|table|td|th|tr|ul|"
    r"video|audio)$",
    re.IGNORECASE,
)
#: What may stand behind the name of a tag.
_ATTRIBUTE: Final = re.compile(r"[\w:-]+=|/?>|[a-z-]+>?$")
#: The brackets around what stands for something else, such as <your name>.
_PLACEHOLDER: Final = re.compile(r"^<(?=[A-Za-z])|(?<=[A-Za-z])>(?=[.,;:!?]*$)")
_TYPE_ARGUMENT: Final = re.compile(r"(?<=\w)<(\w+)>")
_COMMENT: Final = re.compile(r"<!--.*?(?:-->|$)")
_AUTOLINK: Final = re.compile(r"<((?:https?://|mailto:)?[^\s<>@]*[.@:][^\s<>]*)>")

_LINK_END: Final = re.compile(r"\](?:\((?:[^\s()]|\([^\s()]{0,200}\)){0,2000}\)|\[[^\]\s]{0,200}\])")
_OPEN_LINK_END: Final = re.compile(r"\]\((?!.*\)).*$")
_REFERENCE: Final = re.compile(r"\[\^[\w-]{1,40}\]:?|\[\d{1,3}(?:[,–-]\d{1,3})*\](?!\()|【[^】]{0,80}】")
#: An address is read as a whole: what stands in it is no markup.
_ADDRESS: Final = re.compile(r"(?:(?:https?|ftp)://|www\.)[^\s<>\"“”|]+|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")
#: Words without markup.
_BARE: Final = re.compile(r"[A-Za-z0-9'’\"“”,.;:!?()%+=-]+")
_BEHIND_ADDRESS: Final = ".,;:!?*_~'’…]}»"

_ESCAPED: Final = re.compile(r"\\([$#%&.\-+!])")
_STARS: Final = re.compile(r"\*+|~~+|\\[*_`\[\](){}~>|]")
#: What may be multiplied, or raised to a power: before a star, and behind it.
_OPERAND: Final = re.compile(r"(?:\d|(?<![^\W\d_])[^\W\d_]|\))$")
_OPERAND_BEHIND: Final = re.compile(r"[-−]?\d|[^\W\d_](?![^\W\d_])|\(|[^\W\d_]{1,12}\(")
_NUMBER: Final = re.compile(r"[-−]?\d")
_LETTERS: Final = re.compile(r"[^\W\d_]+(?!\*)")
_WINDOWS_PATH: Final = re.compile(r"[\"'“(]*(?:[A-Za-z]:\\|\\\\)\w")
_UNDERSCORES: Final = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")

_EMOJI: Final = re.compile(
    "[\U0001f000-\U0001faff\u2600-\u2767\u2776-\u2793\u2b00-\u2bff\u231a-\u231b\u23e9-\u23fa\u25a0-\u25ff\u2190\u2139\u203c\u2049"
    "\u2b50\u3030\u303d\ufe0e\ufe0f\u200b-\u200f\u2060\ufeff\u20e3\u00ad\u200d\U000e0020-\U000e007f]+"
)
#: Letters in a style of their own (bold, script, …), ligatures, and units in one sign.
_STYLED: Final = re.compile("[\U0001d400-\U0001d7ff\ufb00-\ufb06\u2103\u2109\u3371-\u33df]")
#: Numbers in a circle.
_CIRCLED: Final = re.compile("[\u2460-\u2473\u2776-\u2793]")
_KEYCAP: Final = re.compile("([0-9])\ufe0f?\u20e3")

#: Amounts of money, and formulas that could be taken for one.
_DOLLARS: Final = re.compile(r"\$[-−+]?\.?\d")
_DOLLARS_BEHIND: Final = re.compile(r"[^\w$]*\d[\d.,–-]*\$(?:[^\w$].*)?")
_FORMULA: Final = re.compile(r"\$[^$]+\$(?!\d)|\$\d+(?:\.\d+)?(?!s\b)[ac-jln-zAC-JLN-SU-Z]")

_LATEX: Final = re.compile(r"\\[a-zA-Z]+|\\[()\[\],;!]|\$\$|[{}]")
_LATEX_HINT: Final = re.compile(r"\\[a-zA-Z]{2,}|\\[()\[\]]")
_LATEX_WORDS: Final = {
    **dict.fromkeys(("times", "cdot", "ast"), "×"),
    "div": "÷",
    "pm": "±",
    "sqrt": "√ ",
    **dict.fromkeys(("leq", "le"), "≤"),
    **dict.fromkeys(("geq", "ge"), "≥"),
    **dict.fromkeys(("neq", "ne"), "≠"),
    **dict.fromkeys(("approx", "sim"), "≈"),
    **dict.fromkeys(("to", "rightarrow", "Rightarrow", "implies"), "→"),
    "infty": "∞",
    "sum": "∑",
    "int": "∫",
    "in": "∈",
    "partial": "∂",
    "circ": "°",
    "pi": "π",
    **{
        name: name
        for name in ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "sigma", "phi", "omega")
    },
    **{name: name for name in ("sin", "cos", "tan", "log", "ln", "lim", "max", "min", "exp")},
}


class _Skip(Enum):
    """What is passed over until it ends."""

    NOTHING = None
    LINK = ")"
    TAG = ">"
    COMMENT = "-->"


class InlineMarkup:
    """Takes markup out of words that stand between white space: emphasis, links, code, tags, entities, emoji, LaTeX.

    What spans several words (code, a tag with attributes, the title of a link) is remembered from one to the next, to
    the end of the line at most; a comment to its end. The time for a word is linear in its length.
    """

    def __init__(self, *, picture: str) -> None:
        #: What is said before the description of a picture.
        self._picture = picture
        self._in_code = False
        #: Whether a dollar sign in this line may have begun a formula, which the next one ends.
        self._dollar = False
        self._skipping = _Skip.NOTHING

    def end_line(self) -> None:
        """Nothing but a comment goes on in the next line."""
        self._in_code = self._dollar = False
        if self._skipping is not _Skip.COMMENT:
            self._skipping = _Skip.NOTHING

    def clean(self, word: str) -> str:
        """Return ``word`` without its markup: nothing, or one or several words."""
        if self._skipping is not _Skip.NOTHING:
            if self._skipping is _Skip.TAG and not _ATTRIBUTE.match(word):
                self._skipping = _Skip.NOTHING
                return self.clean(word)
            _, end, word = word.partition(str(self._skipping.value))
            if not end:
                return ""
            self._skipping = _Skip.NOTHING
        if "`" not in word:
            return _code(word) if self._in_code else self._prose(word)
        cleaned: list[str] = []
        for part in re.split(r"(`+)", word):
            if part.startswith("`"):
                self._in_code = not self._in_code
            elif part:
                cleaned.append(_code(part) if self._in_code else self._prose(part))
        return "".join(cleaned)

    def _prose(self, word: str) -> str:
        if _BARE.fullmatch(word) and "www." not in word:
            return word
        if "<" in word or ">" in word:
            word = self._without_tags(word)
        if "]" in word or "[" in word or "【" in word:
            word = self._without_brackets(word)
        found = _ADDRESS.search(word) if "." in word or "/" in word else None
        if found is None:
            return self._without_signs(word)
        address = found[0].rstrip(_BEHIND_ADDRESS)
        while address.endswith(")") and address.count(")", -20) > address.count("(", -200):
            address = address[:-1]
        behind = self._without_signs(word[found.start() + len(address) :])
        return self._without_signs(word[: found.start()]) + _address(address) + behind

    def _without_tags(self, word: str) -> str:
        if "<!--" in word:
            if "-->" not in word:
                self._skipping = _Skip.COMMENT
            word = _COMMENT.sub("", word)
        word = _AUTOLINK.sub(r"\1", word)
        word = _TAG.sub("", _BREAK.sub(", ", word))
        if _OPEN_TAG.search(word):
            self._skipping = _Skip.TAG
            word = _OPEN_TAG.sub("", word)
        return _PLACEHOLDER.sub("", _TYPE_ARGUMENT.sub(r" \1", word))

    def _without_brackets(self, word: str) -> str:
        word = _REFERENCE.sub("", _LINK_END.sub("", word))
        if "](" in word and _OPEN_LINK_END.search(word):
            self._skipping = _Skip.LINK
            word = _OPEN_LINK_END.sub("", word)
        word = re.sub(r"!\[(?=(.?))", lambda match: f"{self._picture}: " if match[1] else self._picture, word)
        return word.replace("\\[", "").replace("\\]", "").replace("[", "").replace("]", "")

    def _without_signs(self, word: str) -> str:
        if "&" in word and ";" in word:
            word = html.unescape(word)
        if "\\" in word and not _WINDOWS_PATH.match(word):
            word = _latex(word) if _LATEX_HINT.search(word) else _ESCAPED.sub(r"\1", word)
        if "$" in word:
            word = self._without_dollars(word)
        if "*" in word or "~~" in word or "\\" in word:
            word = word if word in ("*", "**") else _STARS.sub(_without_star, word)
        if "_" in word:
            word = _UNDERSCORES.sub("", word).replace("_", " ")
        if not word.isascii():
            word = _CIRCLED.sub(lambda match: f" {unicodedata.numeric(match[0]):.0f} ", word)
            word = _EMOJI.sub("", _KEYCAP.sub(r"\1", word))
            if _STYLED.search(word):
                word = unicodedata.normalize("NFKC", word)
        return word

    def _without_dollars(self, word: str) -> str:
        """Take away the signs around a formula, and leave those of money."""
        if not self._dollar and _DOLLARS_BEHIND.fullmatch(word):
            return word
        if word.count("$") % 2:
            self._dollar = not self._dollar
        if _DOLLARS.search(word) and not _FORMULA.search(word):
            return word
        return word.replace("$", "")


def _without_star(match: re.Match[str]) -> str:
    """Return what stars between numbers or variables mean, "×" or "^"; nothing where they are markup."""
    marks, before = match[0], match.string[max(0, match.start() - 2) : match.start()]
    if marks not in ("*", "**") or not before or match.string.startswith("*"):
        return ""
    behind = match.string[match.end() : match.end() + 20]
    usual = _OPERAND.search(before) and _OPERAND_BEHIND.match(behind)
    product = marks == "*" and before[-1].isdigit() and _LETTERS.match(behind)
    power = marks == "**" and before[-1].isalnum() and _NUMBER.match(behind) and match.string.count("**") == 1
    if not (usual or product or power):
        return ""
    if match.string.rstrip(".,;:!?)\"'").endswith(marks):
        return ""
    return " × " if marks == "*" else "^"


def _code(word: str) -> str:
    """Return a word of code in a line of text. Names of several words are read as those."""
    if not word.isascii():
        word = _EMOJI.sub("", word)
    return word.replace("_", " ").replace("()", "")


def _address(address: str) -> str:
    """Return what a person says of an address: the host, and a path of one short word."""
    if "@" in address and "://" not in address:
        return address
    host, _, path = re.sub(r"^\w+://", "", address).partition("/")
    host = host.rpartition("@")[2].removeprefix("www.")
    path = path.rstrip("/")
    return f"{host}/{path}" if re.fullmatch(r"[A-Za-z]{1,12}", path) else host


def _latex(word: str) -> str:
    word = word.replace("}{", " ⁄ " if "frac" in word else " ")

    def read(match: re.Match[str]) -> str:
        name = match[0][1:] if match[0].startswith("\\") else ""
        said = _LATEX_WORDS.get(name, "")
        return f" {said} " if said else ""

    return " ".join(_LATEX.sub(read, word).replace("$", "").split())
