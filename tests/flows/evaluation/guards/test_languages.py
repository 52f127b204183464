"""Whether two texts may have the same language, by scripts and function words."""

from itertools import permutations

import pytest

from pipeline.evaluation.guards.languages import language_of, may_share_language, script_of

TEXTS = {
    "cs": "Toto je dopis, který jsem dnes napsal, ale není to pro něj, protože se na to neptal.",
    "da": "Det er en god dag i dag, og vi kan ikke vente til i morgen med at gå en tur.",
    "de": "Das ist ein Brief, den ich heute geschrieben habe, und er ist nicht für dich.",
    "en": "This is the letter that I wrote today, and it is not for you.",
    "es": "Esta es la carta que escribí hoy, pero no es para el hombre de la casa.",
    "fi": "Tämä on kirje, jonka hän kirjoitti, mutta se ei ole sinulle, koska niin on.",
    "fr": "C'est une lettre que je vous écris, et elle n'est pas pour les gens du village.",
    "hu": "Ez egy levél, amely nem neked van, és már csak azt kérem, hogy ne olvasd el.",
    "id": "Ini adalah surat yang saya tulis untuk anda, dan tidak ada yang lain di dalamnya.",
    "it": "Questa è una lettera che ho scritto per gli amici, ma non è della madre.",
    "nl": "Dit is een brief die ik aan je schrijf, en het is niet voor de andere mensen.",
    "pl": "To jest list, który do ciebie piszę, ale nie jest dla innych i nie ma się co bać.",
    "pt": "Esta é uma carta que não escrevi para você, mas para os meninos da casa do rei.",
    "ro": "Aceasta este o scrisoare pe care nu am scris-o pentru tine, dar sunt și altele bune.",
    "sv": "Det är ett brev som jag har skrivit till dig, men det är inte för de andra.",
    "tr": "Bu bir mektup ve senin için değil, ama daha çok onun gibi olan insanlar var.",
    "vi": "Đây là một lá thư không phải của bạn, và những người này được viết cho các con.",
    "bg": "Това е писмо, което не е за теб, но той се е опитал да каже как са нещата.",
    "ru": "Это письмо, которое я написал не для тебя, но он так и не понял, что было из него.",
    "uk": "Це лист, який я написав не для тебе, але він так і не зрозумів, що це було.",
    "zh": "这是我今天写的一封信，不是给你的。",
    "ja": "これは今日私が書いた手紙で、あなたのためのものではありません。",
    "ko": "이것은 내가 오늘 쓴 편지이고 당신을 위한 것이 아닙니다.",
    "ar": "هذه رسالة كتبتها اليوم وليست لك.",
    "hi": "यह एक पत्र है जो मैंने आज लिखा है।",
    "el": "Αυτό είναι ένα γράμμα που έγραψα σήμερα.",
    "th": "นี่คือจดหมายที่ฉันเขียนวันนี้",
}


def test_any_two_languages_differ():
    alike = [
        (one, other)
        for one, other in permutations(TEXTS, 2)
        if may_share_language(TEXTS[one], TEXTS[other])
    ]
    assert alike == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_its_own_language(name: str):
    assert may_share_language(TEXTS[name], TEXTS[name])
    assert language_of(TEXTS[name]) in (name, None)


@pytest.mark.parametrize(
    "text", ["", "42", "OK", "1 + 1 = 2", "🙂👍", "...", "def f(x): return x ** 2", "Paris"]
)
def test_a_text_without_a_known_language_may_have_each_of_its_script(text: str):
    assert may_share_language(TEXTS["en"], text)
    assert may_share_language(text, TEXTS["de"])


def test_a_text_of_two_scripts_has_the_one_of_most_letters():
    assert script_of("Переведите слово cat на русский") == "CYRILLIC"
    assert script_of("The word кот means cat in Russian") == "LATIN"
    assert script_of("东京 とうきょう") == "JAPANESE"
    assert script_of("ab кл") is None
    assert script_of("\uff21\uff22\uff23\uff24\uff25 \U0001d400\U0001d401") == "LATIN"


def test_latin_names_do_not_make_a_chinese_text_latin():
    assert script_of("请用 Python 和 MLflow 编写这个程序，然后运行它") == "CJK"
    assert script_of("파일 settings.toml 을 열어 주세요") == "HANGUL"
    assert script_of("The name of this city is 东京.") == "LATIN"


def test_a_long_text_is_read_at_once():
    assert not may_share_language("the and of " * 1_000_000, "это как для " * 1_000_000)
