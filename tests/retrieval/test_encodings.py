"""Encodings: detected by marks, zero bytes or letters, and reported if uncertain."""

import time

import pytest
from hypothesis import given, strategies as st

from ragaccel.retrieval import index_folder
from ragaccel.retrieval.loaders import (
    decode_text,
    detect_encoding,
    document_from_bytes,
    encoding_warning,
    looks_binary,
)

JAPANESE = "この島の灯台は百年前に建てられ、いまも毎晩明かりをともし、船の目印になる。\n"
SIMPLIFIED = "这座灯塔建于一百年前，现在每天晚上仍然亮着，过往的船只都把它当作航标来使用。\n"
TRADITIONAL = "這座燈塔建於一百年前，現在每天晚上仍然亮著，過往的船隻都把它當作航標來使用。\n"
KOREAN = (
    "이 섬의 등대는 백 년 전에 세워졌으며 지금도 밤마다 불을 밝히고 배들의 길잡이가 되고 있다.\n"
)
RUSSIAN = "Маяк на острове построили сто лет назад, и по сей день он светит каждую ночь.\n"
LEGACY = {
    JAPANESE: "shift_jis cp932 euc_jp iso2022_jp",
    SIMPLIFIED: "gb2312 gbk gb18030",
    TRADITIONAL: "big5 cp950",
    KOREAN: "euc_kr cp949",
    RUSSIAN: "koi8_r cp1251 cp866 iso8859_5",
    "Маяк на острові збудували сто років тому, і він досі світить щоночі; їжі там досить.\n": (
        "koi8_u cp1251"
    ),
    "Ο φάρος του νησιού χτίστηκε πριν από εκατό χρόνια και ανάβει ακόμη κάθε βράδυ.\n": (
        "cp1253 iso8859_7"
    ),
    "Latarnię na wyspie zbudowano sto lat temu i wciąż świeci każdej nocy; źródło jest żółte.\n": (
        "cp1250 iso8859_2"
    ),
    "Maják na ostrově postavili před sto lety a dodnes svítí každou noc; kůň se lekl řeřichy.\n": (
        "cp1250"
    ),
    "המגדלור שעל האי נבנה לפני מאה שנים והוא מאיר עד היום בכל לילה.\n": "cp1255",
    "بنيت المنارة في الجزيرة قبل مئة عام ولا تزال تضيء كل ليلة حتى اليوم.\n": "cp1256",
    "ประภาคารบนเกาะนี้สร้างขึ้นเมื่อร้อยปีก่อน และยังคงส่องแสงทุกคืนจนถึงวันนี้\n": "cp874",
    "Adadaki deniz feneri yüz yıl önce yapıldı ve hâlâ her gece ışık saçıyor, şaşırmıyor.\n": (
        "cp1254"
    ),
}
WESTERN = [
    "Der Leuchtturm wurde vor über hundert Jahren gebaut – „schöne Grüße“ aus Öhringen.\n",
    "Le phare a été bâti il y a cent ans ; « très cher », dit l’œil, à 35 € près. Ça va.\n",
    "¿Cuándo se construyó el faro? Hace cien años, y aún brilla; ¡mañana también, señor Muñoz!\n",
    "O farol não é só construção: há cem anos que dá luz às embarcações. Ação, coração!\n",
    "Fyrtårnet på øen blev bygget for hundrede år siden; det lyser stadig på søen. Ærø og Ål.\n",
    "Il faro è qui da cent'anni; perché è così? Però è già più in là. È là. È lì. È giù. È su.\n",
    "Vitinn á eyjunni var byggður fyrir hundrað árum og þar lýsir hann enn þá, ágætlega.\n",
    "Müller — Möller — Größe — 12 m² — 25 °C — §§ 3–5 — ±2 µm — ½ Liter — Café à\n",
    "He said “I know” — “It’s Zoë’s naïve résumé” — and left… ‘Indeed’ — ‘I see’, —l, —b, —m.\n",
    "ÉCOLE NORMALE SUPÉRIEURE — ÇÀ ET LÀ — ÜBERGRÖSSE ÄÖÜ — NIÑO — SÃO JOSÉ\n",
]


@pytest.mark.parametrize("text", LEGACY)
def test_legacy_and_unicode_text_is_read_right(text):
    for times in (2, 5, 400):
        mixed = "Version 1.10 of the manual, section 4.\n" + text * times
        for encoding in (*LEGACY[text].split(), "utf-8", "utf-8-sig", "utf-16"):
            data = mixed.encode(encoding)
            assert decode_text(data)[0] == mixed, encoding
            assert encoding_warning(data) == "", encoding


@pytest.mark.parametrize("text", WESTERN)
def test_western_text_is_decoded_unchanged(text):
    for part in (text, text * 3, text * 100, text[: len(text) // 2]):
        for encoding in ("cp1252", "latin_1"):
            data = part.encode(encoding, "ignore")
            assert decode_text(data)[0] == data.decode("cp1252")
            assert encoding_warning(data) == ""
        for encoding in ("utf-16-le", "utf-16-be", "utf-32"):
            data = part.encode(encoding)
            assert decode_text(data)[0] == part
            assert not looks_binary(data)
    assert decode_text(b"caf\xe9 \x81")[1] == "latin-1"


@given(st.binary(max_size=200))
def test_decoding_never_fails(data):
    assert "\r" not in decode_text(data)[0]


@given(st.text(max_size=200))
def test_utf8_is_read_as_it_is(text):
    text = text.encode("utf-8", "ignore").decode()
    if not text.startswith("\ufeff") and "\0" not in text:
        expected = text.replace("\r\n", "\n").replace("\r", "\n")
        assert decode_text(text.encode())[0] == expected


def test_a_character_cut_at_the_end_of_the_sample_does_not_matter():
    for text, encoding in ((JAPANESE, "cp932"), (SIMPLIFIED, "gb18030"), (KOREAN, "cp949")):
        for shift in range(4):
            whole = "x" * shift + text * 600
            assert decode_text(whole.encode(encoding))[0] == whole


def test_invalid_characters_are_counted_in_the_warning():
    broken = (RUSSIAN * 20).encode("cp1251").replace("остров".encode("cp1251"), b"\x98\x98", 3)
    text, encoding = decode_text(broken)
    assert (encoding, text.count("\ufffd")) == ("cp1251", 6)
    assert "6 of its characters" in encoding_warning(broken)
    for data in ("пять \x1b$B рублей".encode(), b"price \x1b$B of nothing much \x1b(B"):
        assert decode_text(data)[0] == data.decode(), "an escape in UTF-8 is not Japanese"


def test_only_a_sample_is_looked_at():
    data = (RUSSIAN * 100_000).encode("koi8_r")
    began = time.process_time()
    for text in (data, b"a" * 1_000_000 + data):
        assert detect_encoding(text) == ("koi8_u", True)
    assert time.process_time() - began < 4.0


def test_every_text_format_reads_them():
    for text, encoding, name in (
        ("город,год\nМосква,1147\nКазань,1005\n", "cp1251", "a.csv"),
        (f"<html><body><p>{JAPANESE}Казань</p></body></html>", "cp932", "a.html"),
        (f"{JAPANESE} Казань", "euc_jp", "a.md"),
    ):
        assert "Казань" in document_from_bytes(text.encode(encoding), name).text


def test_an_uncertain_encoding_is_reported_once_and_kept(store, embedder, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "sure.txt").write_bytes((RUSSIAN * 5).encode("koi8_r"))
    (docs / "short.txt").write_bytes("Отчёт: see below\n".encode("koi8_r"))
    assert "uncertain" in encoding_warning((docs / "short.txt").read_bytes())
    report = index_folder(store, embedder, docs)
    assert (set(report.doubtful), report.reported_before) == ({"short.txt"}, set())
    assert (report.added, report.failed) == (2, {})
    again = index_folder(store, embedder, docs)
    assert (set(again.doubtful), again.reported_before) == ({"short.txt"}, {"short.txt"})
    assert again.is_current
    (docs / "short.txt").write_text("Отчёт")
    assert index_folder(store, embedder, docs).doubtful == {}
    assert store.unread() == {}
