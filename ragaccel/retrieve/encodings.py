"""Encodings: which of those from before Unicode a text is in, told by the letters it would have."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

_SAMPLE_BYTES = 1 << 14
_FEW_LETTERS = 10  # fewer than these tell nothing for certain
_SURE, _LIKELY, _AHEAD = 0.62, 0.45, 0.12
_FOREIGN_WORDS = 0.4  # of Western letters beyond ASCII, fewer stand in runs of three

# What is frequent in a language, and which share of its letters that usually is.
_HIRAGANA = "".join(map(chr, range(0x3041, 0x3094)))
_KATAKANA = "".join(map(chr, range(0x30A1, 0x30F7))) + "ー々"
_KANJI = (
    "日一人年大十二本中長出三時行見月分後前生五間上東四今金入学高円子外下来気小山話女北書先名水半"
    "西電校語聞食車何南万毎白天火読会国的事者自社発場地業方新手力問代明動京目通言理体田主題意不作用"
    "度強公持以思家世多正安院心界教文元重近考画海知集別物使品計特始運終広住真有口少料工建止送切研足"
    "部政経関定内実所対開立現調化性合務区保議民連全回最表利当要成受"
)
_SIMPLIFIED = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后"
    "作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因"
    "只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应"
    "战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿"
    "原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太"
    "量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界"
    "达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今"
)
_TRADITIONAL = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後"
    "作裡用道行所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因"
    "只從想實日軍者意無力它與長把機十民第公此已工使情明性知全三又關點正業外將兩高間由問很最重並物手應"
    "戰向頭文體政美相見被利什二等產或新己制身果加西斯月話合回特代內信表化老給世位次度門任常先海通教兒"
    "原東聲提立及比員解水名真論處走義各入幾口認條平系氣題活爾更別打女變四神總何電數安少報才結反受目太"
    "量再感建務做接必場件計管期市直德資命山金指克許統區保至隊形社便空決治展馬科司五基眼書非則聽白卻界"
    "達光放強即像難且權思王象完設式色路記南品住告類求據程北邊死張該交規萬取拉格望覺術領共確傳師觀清今臺灣"
)
_HANGUL = (
    "이다는의에을를가한로고하지은기사도시으리아나그서인어대자스해과정들있부원수것일전보라제주여만게구적상장"
    "동와면관세우진국비안소공연성위유중생신회용오개조당모미운학경무단계방내물발선현할교화했음년치문점산간거되"
    "러드르마바였민없권행더차재명외말분역실입본결임력트같출체타호통된반군날달데히파않못집월직저각터김열양활프크"
    "불니까요업술식및등약속새록려합설법노높름습겠었았"
)


@dataclass(frozen=True, slots=True)
class _Language:
    """What tells a language: its frequent characters, and how much of a text they usually are."""

    encodings: tuple[str, ...]
    frequent: frozenset[str]
    share: float
    mixes: bool = False  # its words need not be of three letters


def _language(encodings: str, frequent: str, share: float, *, mixes: bool = False) -> _Language:
    letters = frozenset(frequent + frequent.upper()) if not mixes else frozenset(frequent)
    return _Language(tuple(encodings.split()), letters, share, mixes)


_LANGUAGES = (
    _language("cp932 euc_jp", _HIRAGANA + _KATAKANA + _KANJI, 0.75, mixes=True),
    _language("gb18030", _SIMPLIFIED, 0.5, mixes=True),
    _language("cp950 big5hkscs", _TRADITIONAL, 0.5, mixes=True),
    _language("cp949", _HANGUL, 0.7, mixes=True),
    _language("cp1251 koi8_u iso8859_5 cp866", "оеаинтсрвл", 0.66),
    _language("cp1251 koi8_u iso8859_5 cp1125", "оаинвертсіїє", 0.66),
    _language("cp1251 iso8859_5", "аоиенрстувј", 0.68),
    _language("cp1253 iso8859_7", "αοιετνσρηάίόέήύώς", 0.75),
    _language("cp1255", "יוהלארתבשמנ", 0.72),
    _language("cp1256 iso8859_6", "اليمونترهبةدع", 0.78),
    _language("cp874", "านรอกเงยลวมสทตด่้ิี", 0.75),
)
# The letters beyond ASCII of languages in Latin script.
_WESTERN = (
    "àâæçéèêëîïôœùûüÿ",
    "äöüßé",
    "áéíóúüñ",
    "ãáâàçéêíóôõúü",
    "àèéìíîòóùú",
    "éëïöüèêáó",
    "åäöéàü",
    "åæøéèêòóôäöü",
    "áéíóúýþðæö",
    "äõöüšž",
    "àçèéíïòóúü",
    "ëçé",
)
_OTHER_LATIN = (
    ("cp1250 iso8859_2", "ąćęłńóśźż"),
    ("cp1250 iso8859_2", "áčďéěíňóřšťúůýž"),
    ("cp1250 iso8859_2", "áäčďéíĺľňóôŕšťúýž"),
    ("cp1250 iso8859_2", "áéíóöőúüű"),
    ("cp1250 iso8859_2", "čćđšž"),
    ("cp1250 iso8859_2", "ăâîşţ"),
    ("cp1254 iso8859_9", "çğıöşüâîû"),
    ("cp1257 iso8859_13", "ąčęėįšųūž"),
    ("cp1257 iso8859_13", "āčēģīķļņšūžō"),
)
_PUNCTUATION = frozenset(
    "、。，．・：；？！（）「」『』【】〈〉《》〔〕“”‘’„‚‹›«»…‥—–―‐・·•°§©®™№€£¥¢¡¿×÷±\xa0\xad\u3000～〜％"
    "０１２３４５６７８９"
)
_HIGH = re.compile(rb"[\x80-\xff]")
_RUN = re.compile(r"[^\x00-\x7f]{3,}")


@dataclass(frozen=True, slots=True)
class Guess:
    """An encoding that a text may be in, and whether its letters leave no doubt."""

    encoding: str
    is_certain: bool = True


def guess_encoding(data: bytes) -> Guess:
    """Tell the encoding of a text that is in none of Unicode's, from a sample of its bytes.

    Each candidate is tried on the sample, which begins at the first byte beyond ASCII; the letters
    that come out are compared with those that are frequent in the languages written in it. Text in
    Latin letters is Windows-1252 unless another alphabet explains what that leaves unexplained.
    Where nothing fits, charset-normalizer is asked, and the guess is not certain.
    """
    first = _HIGH.search(data)
    if first is None:
        return Guess("iso2022_jp_2" if _is_iso2022_jp(data[:_SAMPLE_BYTES]) else "ascii")
    sample = data[first.start() : first.start() + _SAMPLE_BYTES]
    western = _decoded(sample, "cp1252")
    num_letters = _letters(western).total()
    unexplained = min(_unexplained(western, alphabet) for alphabet in _WESTERN)
    is_latin = _share_in_words(western) < _FOREIGN_WORDS
    if is_latin and unexplained <= 0.02 * num_letters:
        return Guess(_western_name(data))
    found = _by_frequency(sample)
    if found is not None:
        return found
    latin = _by_alphabet(sample) if unexplained >= max(3, 0.04 * num_letters) else None
    if latin is not None:
        return Guess(latin)
    if is_latin or num_letters < _FEW_LETTERS:
        return Guess(_western_name(data))
    return Guess(_asked(sample) or _western_name(data), is_certain=False)


def _by_frequency(sample: bytes) -> Guess | None:
    """The encoding whose letters are the frequent ones of a language in a script of its own."""
    scores: dict[str, float] = {}
    texts: dict[str, str] = {}
    for language in _LANGUAGES:
        for encoding in language.encodings:
            text = texts.get(encoding) or texts.setdefault(encoding, _decoded(sample, encoding))
            scores[encoding] = max(scores.get(encoding, 0.0), _score(text, language))
    best = max(scores, key=scores.__getitem__)
    if scores[best] < _LIKELY:
        return None
    others = [scores[name] for name in scores if texts[name] != texts[best]]
    ahead = scores[best] - max(others, default=0.0)
    enough = _letters(texts[best]).total() >= _FEW_LETTERS
    if not enough and scores[best] < _SURE:
        return None
    return Guess(best, enough and scores[best] >= _SURE and ahead >= _AHEAD)


def _score(text: str, language: _Language) -> float:
    """How far a text is like a language: 1 for one like any other, near 0 for none."""
    letters = _letters(text)
    total = letters.total()
    if not total:
        return 0.0
    known = sum(number for letter, number in letters.items() if letter in language.frequent)
    broken = sum(number for letter, number in letters.items() if _is_broken(letter))
    score = min(1.0, known / total / language.share) - min(1.0, 5 * broken / total)
    if not language.mixes:
        score *= min(1.0, 1.2 * _share_in_words(text))
    return score


def _share_in_words(text: str) -> float:
    """Which share of the letters beyond ASCII stands in words that are made of them."""
    runs = "".join(_RUN.findall(text))
    return _letters(runs).total() / max(1, _letters(text).total())


def _is_broken(letter: str) -> bool:
    """Whether a character stands in no text: none at all, a control, one for private use."""
    return letter == "\ufffd" or unicodedata.category(letter) in ("Cc", "Co", "Cn")


def _by_alphabet(sample: bytes) -> str | None:
    """Another encoding of Latin letters, with an alphabet that leaves nothing unexplained."""
    best: tuple[int, str] | None = None
    for encodings, alphabet in _OTHER_LATIN:
        for encoding in encodings.split():
            text = _decoded(sample, encoding)
            left = _unexplained(text, alphabet)
            if left <= 0.02 * _letters(text).total() and (best is None or left < best[0]):
                best = left, encoding
    return best[1] if best else None


def _unexplained(text: str, alphabet: str) -> int:
    """How many letters are not of an alphabet; what is no letter at all counts three times."""
    known = alphabet + alphabet.upper() + "İ"
    left = ((letter, n) for letter, n in _letters(text).items() if letter not in known)
    return sum(n if letter.isalpha() else 3 * n for letter, n in left)


def _letters(text: str) -> Counter[str]:
    """The characters beyond ASCII, without the punctuation that is the same everywhere."""
    counts = Counter(text)
    return Counter(
        {
            letter: number
            for letter, number in counts.items()
            if letter > "\x7f" and letter not in _PUNCTUATION
        }
    )


def _decoded(sample: bytes, encoding: str) -> str:
    """A sample as an encoding reads it; a character that is cut at its end is left out."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(sample)


def _western_name(data: bytes) -> str:
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def _asked(sample: bytes) -> str | None:
    """What charset-normalizer takes a text for, where it is installed."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return None
    best = from_bytes(sample).best()
    return best.encoding if best is not None else None


def _is_iso2022_jp(sample: bytes) -> bool:
    """Whether a text without a byte beyond ASCII switches to Japanese by escape sequences."""
    if b"\x1b$" not in sample:
        return False
    text = _decoded(sample, "iso2022_jp_2")
    return "\ufffd" not in text and any(letter in _HIRAGANA + _KATAKANA for letter in text)
