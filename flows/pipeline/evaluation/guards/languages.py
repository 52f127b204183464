"""Compare the languages of two texts by their scripts and their function words."""

import re
import unicodedata
from collections import Counter

READ = 4_000
"""Maximum number of characters of a text that are read."""

LEAST_LETTERS = 4
"""Minimum number of letters of a text; with fewer letters, the script is unknown."""

LEAST_WORDS = 2
"""Minimum number of function words of a text; with fewer, the language is unknown."""

CLEAR = 1.5
"""A language is recognized only if the text has at least this many times as many function words of
it as of any other language."""

DENSE = {"CJK": 3, "HIRAGANA": 3, "KATAKANA": 3, "HANGUL": 3}
"""Weight of a letter by script; 1 for all other scripts. A letter of these scripts is a syllable or
a word. With the weight, a Chinese text with some Latin names counts as Chinese."""

KANA_SHARE = 0.1
"""Minimum share of kana among the letters of a Japanese text."""

_FUNCTION_WORDS = {
    "LATIN": {
        "da": "og at det er en et som på af for med ikke den til jeg har de om var vi kan også",
        "de": "der die das und ist nicht ein eine ich sie mit auf für zu den dem im von es sind",
        "en": "the and of to is in that it you for with this are was be have not on as at but or",
        "es": "el la los las es un una de que en por para con no se su lo al del como más pero",
        "fi": "ja on ei se että oli hän mutta kun niin ovat joka tai myös mitä sen ole voi jos",
        "fr": "le la les et est un une des du de que qui dans pour pas sur avec ce vous je ne il",
        "hu": "az és hogy nem is egy van meg de ez már csak vagy ha mint volt amely lehet kell",
        "id": "yang dan di untuk dengan ini itu dari tidak adalah pada ke akan saya anda atau bisa",
        "it": "il la le di che un una per non con del della sono gli in ma come anche si nel è",
        "nl": "de het een en van is niet dat die in op te met voor zijn er aan ook maar je ik",
        "pl": "nie na się do jest to że jak ale po co tak są dla od przez oraz ich można lub jako",
        "pt": "os as um uma de que em por para com não se do da dos das no na mais como ao é",
        "ro": "și este nu un în la de pe cu din că pentru sunt care mai sau acest prin",
        "sv": "och att det är en ett som på av för med inte den till jag har de om var",
        "tr": "ve bir bu için ile da de çok olarak ne gibi daha var değil ama olan en her veya ya",
        "vi": "là và của có không một được cho trong với các những này người để như",
        "cs": "je se na že to do ale jako pro není jsou by tak který nebo však při ve ze za pokud",
    },
    "CYRILLIC": {
        "bg": "че това как за но той тя те не на да се са от или който при също може",
        "ru": "что это как для но он она они не на по все так его было из или быть также",
        "uk": "що це як для але він вона вони не на та до його було із або бути також є",
    },
}
"""Frequent function words, by script and language. Several languages may have the same word: a
language is known only if it has many more function words in the text than any other language."""

_WORDS = {
    script: {language: frozenset(words.split()) for language, words in languages.items()}
    for script, languages in _FUNCTION_WORDS.items()
}


def may_share_language(one: str, other: str) -> bool:
    """Return whether two texts may have the same language; True if either language is unknown."""
    scripts = script_of(one), script_of(other)
    if None in scripts:
        return True
    if scripts[0] != scripts[1]:
        return False
    languages = language_of(one), language_of(other)
    return None in languages or languages[0] == languages[1]


def script_of(text: str) -> str | None:
    """Return the script of more than half of a text's letters, such as LATIN, or None."""
    letters: Counter[str] = Counter()
    for character, count in Counter(_normalized(text)).items():
        if character.isalpha():
            script = unicodedata.name(character, "UNKNOWN").split()[0]
            letters[script] += count * DENSE.get(script, 1)
    total = letters.total()
    if total < LEAST_LETTERS:
        return None
    kana = letters.pop("HIRAGANA", 0) + letters.pop("KATAKANA", 0)
    if kana:
        is_japanese = kana >= KANA_SHARE * (kana + letters["CJK"])
        letters["JAPANESE"] = kana + (letters.pop("CJK", 0) if is_japanese else 0)
    ((most, count),) = letters.most_common(1)
    return most if 2 * count > total else None


def language_of(text: str) -> str | None:
    """Return the language of a text by its function words; None if it is not known."""
    known = _WORDS.get(script_of(text) or "", {})
    words = Counter(re.findall(r"[^\W\d_]+", _normalized(text).casefold()))
    hits = Counter({language: sum(words[word] for word in own) for language, own in known.items()})
    if not hits:
        return None
    (language, most), (_, second) = hits.most_common(2)
    return language if most >= LEAST_WORDS and most >= CLEAR * second else None


def _normalized(text: str) -> str:
    return unicodedata.normalize("NFKC", text[:READ])
