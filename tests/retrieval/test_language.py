"""The language of a text, told by its script and its frequent words."""

import pytest

from ragaccel.retrieval.language import frequent_words, language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who was it an hour ago?", "English"),
        ("kaffemaschine alle lichter gleichzeitig an, was tun", "German"),
        ("was an alle geschickt wurde", "German"),
        ("Iron Man actor", "English"),
        ("Mir space station", "English"),
        ("was it sent to all", "English"),
        ("Anna's phone number: 555 0199.", "English"),
        ("Copper pipe 22 mm: 9.5 l, size S, vitamin C, 3 m", "English"),
        ("l’eau est chaude", "French"),
        ("O preço: 30", "English"),
        ("Siobhan O'Neill: engineer; Jean d'Artagnan: engineer", "English"),
        (
            "What does error E mean at seven o'clock, fish 'n' chips, plan Y, Côte d'Ivoire",
            "English",
        ),
        ("Vitamin E: 15 mg; blood group O; D'Artagnan's office", "English"),
        ("é o sal", "Portuguese"),
        ("È aperto?", "Italian"),
        ("Двери красит Мина", ""),
        ("price per metre ash handrail", "English"),
        ("Article no.: 14; Price per piece: 88.00; Remark: non-slip", "English"),
        ("no smoking", "English"),
        ("First come, first served.", "English"),
        ("Mon 9 am; field of 40 ha; die casting; World War memorial", "English"),
        ("Opens 9 am Monday", "English"),
        ("Las Vegas hotel prices", "English"),
        ("Rio de Janeiro or Los Angeles office", "English"),
        ("Vincent van Gogh paintings", "English"),
        ("double room, en suite", "English"),
        ("Die Garantie gilt zwei Jahre.", "German"),
        ("Gilt die Garantie?", "German"),
        ("Am Montag geschlossen", "German"),
        ("Vorstandssitzung am 13. November", "German"),
        ("Wer hat den Schlüssel?", "German"),
        ("Prix par nuit", "French"),
        ("La France est grande", "French"),
        ("Preço do bilhete de Lisboa", "Portuguese"),
        ("¿Viene con cable?", "Spanish"),
        ("La caldera no funciona", "Spanish"),
        ("Come funziona?", "Italian"),
        ("Il prezzo per notte non è fisso", "Italian"),
        ("Hoe werkt dit?", "Dutch"),
    ],
)
def test_the_language_of_few_words_is_that_with_most_frequent_ones(text, language):
    assert language_of(text) == language


def test_an_english_word_of_another_language_becomes_no_stop_word_of_english():
    assert not {"no", "per", "non", "come", "war"} & frequent_words("English")
    assert {"no", "con"} <= frequent_words("Spanish")
    assert not {"¿"} & frequent_words("Spanish")
