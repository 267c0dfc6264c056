"""Texts that nobody reads aloud, and that somebody may send."""

from __future__ import annotations

from typing import Final

ODD_TEXTS: Final = (
    "a" * 2000,
    "1" * 300,
    "1,000," * 50,
    "x1y2" * 75,
    "aB" * 150,
    "a-b'c/d." * 40,
    "(" * 1000 + ")" * 1000,
    "." * 1999 + "x",
    "[a](/b/)" * 40,
    "https://example.com/" + "q=1&" * 75,
    "The quick brown fox jumps over the lazy dog " * 45,
    "\x07\x1b[0m'\"`${}%s%n\\",
    "🎉 Congratulations 🎉 on 100 % 你好 Привет ελληνικά שלום",
    "Zyxgrth Llanfairpwllgwyngyllgogerychwyrndrobwll naïve Łódź İstanbul ﬁne ½ ² ٣",
    "$1,234,567,890,123,456,789.99 −5 ±3 №7 1/0 0/0 99:99 31/31/3131 IIII MMMM",
    "S.O.S. U.S.A. e.g. a.b.c.d.e.f 1.2.3.4 v2.0-rc1+x 10^100 #1 @me &c. =",
)
