"""Loaders: read the text of a file by its format and encoding."""

from __future__ import annotations

import codecs
import re
import time
import unicodedata
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import accumulate
from operator import itemgetter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document
from ragaccel.paths import TooLargeError, read_regular_file
from ragaccel.retrieval.loaders.process import ReaderProcess, check_text_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_DETECTION_BYTES = 1 << 14
_MIN_LETTERS = 10  # a text with fewer non-ASCII letters never has a certain encoding
_CERTAIN_SCORE, _LIKELY_SCORE, _MIN_LEAD = 0.62, 0.45, 0.12
_FOREIGN_SCRIPT_SHARE = 0.4  # of non-ASCII letters in runs; Western text has a smaller share

# the frequent characters of each language
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


# the encodings of a language, its frequent characters, their share of a typical text, and whether
# its words have at least three letters
_LANGUAGES = (
    ("cp932 euc_jp", _HIRAGANA + _KATAKANA + _KANJI, 0.75, False),
    ("gb18030", _SIMPLIFIED, 0.5, False),
    ("cp950 big5hkscs", _TRADITIONAL, 0.5, False),
    ("cp949", _HANGUL, 0.7, False),
    ("cp1251 koi8_u iso8859_5 cp866", "оеаинтсрвл", 0.66, True),
    ("cp1251 koi8_u iso8859_5 cp1125", "оаинвертсіїє", 0.66, True),
    ("cp1251 iso8859_5", "аоиенрстувј", 0.68, True),
    ("cp1253 iso8859_7", "αοιετνσρηάίόέήύώς", 0.75, True),
    ("cp1255", "יוהלארתבשמנ", 0.72, True),
    ("cp1256 iso8859_6", "اليمونترهبةدع", 0.78, True),
    ("cp874", "านรอกเงยลวมสทตด่้ิี", 0.75, True),
)
# the non-ASCII letters of languages in Latin script
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
_NON_ASCII = re.compile(rb"[\x80-\xff]")
_NON_ASCII_RUN = re.compile(r"[^\x00-\x7f]{3,}")


def detect_encoding(data: bytes) -> tuple[str, bool]:
    """Detect the legacy encoding of a text in no Unicode encoding; return (name, is certain).

    Each candidate decodes a sample, which begins at the first non-ASCII byte. The letters are
    compared with the frequent letters of the languages written in that encoding. Text in Latin
    script is Windows-1252 unless the alphabet of another language explains letters that
    Windows-1252 does not. If nothing fits, charset-normalizer decides, and the result is uncertain.
    """
    first = _NON_ASCII.search(data)
    if first is None:
        return "iso2022_jp_2" if _is_iso2022_jp(data[:_DETECTION_BYTES]) else "ascii", True
    sample = data[first.start() : first.start() + _DETECTION_BYTES]
    western = _decoded_as(sample, "cp1252")
    num_letters = _letters(western).total()
    unexplained = min(_count_unexplained(western, alphabet) for alphabet in _WESTERN)
    is_latin = _share_in_words(western) < _FOREIGN_SCRIPT_SHARE
    if is_latin and unexplained <= 0.02 * num_letters:
        return _western_name(data), True
    if found := _by_frequency(sample):
        return found
    latin = _by_alphabet(sample) if unexplained >= max(3, 0.04 * num_letters) else None
    if latin or is_latin or num_letters < _MIN_LETTERS:
        return latin or _western_name(data), True
    return _detect_by_library(sample) or _western_name(data), False


def _by_frequency(sample: bytes) -> tuple[str, bool] | None:
    """Return the encoding whose language's frequent letters fit best, or None if none fits.

    Only languages that are not written in Latin script are tried.
    """
    scores: dict[str, float] = {}
    texts: dict[str, str] = {}
    for encodings, frequent, share, has_words in _LANGUAGES:
        for name in encodings.split():
            texts[name] = texts.get(name) or _decoded_as(sample, name)
            score = _score(texts[name], frequent + frequent.upper(), share)
            score *= min(1.0, 1.2 * _share_in_words(texts[name])) if has_words else 1.0
            scores[name] = max(scores.get(name, 0.0), score)
    best = max(scores, key=scores.__getitem__)
    others = [scores[name] for name in scores if texts[name] != texts[best]]
    ahead = scores[best] - max(others, default=0.0)
    enough = _letters(texts[best]).total() >= _MIN_LETTERS
    if scores[best] < (_LIKELY_SCORE if enough else _CERTAIN_SCORE):
        return None
    return best, enough and scores[best] >= _CERTAIN_SCORE and ahead >= _MIN_LEAD


def _score(text: str, frequent: str, share: float) -> float:
    """Return how similar a text is to a language: 1 for typical text, near 0 for others."""
    letters, known = _letters(text), frozenset(frequent)
    total = max(1, letters.total())
    right = sum(number for letter, number in letters.items() if letter in known)
    broken = sum(number for letter, number in letters.items() if _is_invalid(letter))
    return min(1.0, right / total / share) - min(1.0, 5 * broken / total)


def _share_in_words(text: str) -> float:
    """Return the share of non-ASCII letters that are in runs of three or more."""
    runs = "".join(_NON_ASCII_RUN.findall(text))
    return _letters(runs).total() / max(1, _letters(text).total())


def _is_invalid(letter: str) -> bool:
    """Return whether a character never occurs in text: invalid, control or private use."""
    return letter == "\ufffd" or unicodedata.category(letter) in ("Cc", "Co", "Cn")


def _by_alphabet(sample: bytes) -> str | None:
    """Return the encoding in which a text fits a Latin alphabet that is not Western, or None."""
    fitting = []
    for encodings, alphabet in _OTHER_LATIN:
        for encoding in encodings.split():
            text = _decoded_as(sample, encoding)
            left = _count_unexplained(text, alphabet)
            if left <= 0.02 * _letters(text).total():
                fitting.append((left, encoding))
    return min(fitting, key=itemgetter(0))[1] if fitting else None


def _count_unexplained(text: str, alphabet: str) -> int:
    """Count the characters outside an alphabet; those that are not letters count three times."""
    known = alphabet + alphabet.upper() + "İ"
    left = ((letter, n) for letter, n in _letters(text).items() if letter not in known)
    return sum(n if letter.isalpha() else 3 * n for letter, n in left)


def _letters(text: str) -> Counter[str]:
    """Count the non-ASCII characters, without punctuation common to all languages."""
    counts = Counter(text).items()
    return Counter({c: number for c, number in counts if c > "\x7f" and c not in _PUNCTUATION})


def _decoded_as(sample: bytes, encoding: str) -> str:
    """Decode a sample; drop a character that the sample's end cuts."""
    return codecs.getincrementaldecoder(encoding)("replace").decode(sample)


def _western_name(data: bytes) -> str:
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def _detect_by_library(sample: bytes) -> str | None:
    """Return charset-normalizer's result, or None if it is not installed or finds nothing."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return None
    best = from_bytes(sample).best()
    return best.encoding if best is not None else None


def _is_iso2022_jp(sample: bytes) -> bool:
    """Return whether ASCII bytes switch to Japanese by escape sequences (ISO-2022-JP)."""
    if b"\x1b$" not in sample:
        return False
    text = _decoded_as(sample, "iso2022_jp_2")
    return "\ufffd" not in text and any(letter in _HIRAGANA + _KATAKANA for letter in text)


_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNICODE = ("utf-8", *(name for _, name in _BYTE_ORDER_MARKS), "utf-16-le", "utf-16-be")
_SAMPLE_BYTES = 1 << 16
_ESCAPE = b"\x1b$"  # switches to Japanese in seven-bit text
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\f\x0b\x1b\x1a")


def looks_binary(data: bytes) -> bool:
    """Return whether bytes are not text in any encoding that ``decode_text`` knows."""
    sample = data[:_SAMPLE_BYTES]
    if _marked_encoding(sample) or _unmarked_utf16(sample):
        return False
    if b"\0" in sample:
        return True
    return len(sample) - len(sample.translate(None, _CONTROLS)) > len(sample) // 50


def decode_text(data: bytes) -> tuple[str, str]:
    """Decode a text file; return (text, encoding), with every line end as a single newline.

    A byte order mark decides. Without one, the order is UTF-16 by its zero bytes, UTF-8, then
    ``detect_encoding``, which falls back to Windows-1252 or Latin-1, which decodes anything.
    """
    text, encoding, _ = _decoded(data)
    return text.replace("\r\n", "\n").replace("\r", "\n"), encoding


def encoding_warning(data: bytes) -> str:
    """Return a warning if ``decode_text`` may decode bytes wrongly, else an empty string."""
    text, encoding, is_certain = _decoded(data)
    name = encoding.replace("_", "-")
    if not is_certain:
        return f"read as {name}, which is uncertain: save it as UTF-8 if its text looks wrong"
    broken = text.count("\ufffd") if encoding not in _UNICODE else 0
    if broken:
        return (
            f"read as {name}, in which {broken:,} of its characters are invalid: save it as UTF-8"
        )
    return ""


def _decoded(data: bytes) -> tuple[str, str, bool]:
    """Return the text, its encoding, and whether the encoding is certain."""
    encoding = _marked_encoding(data) or _unmarked_utf16(data[:_SAMPLE_BYTES])
    for name in (encoding or "utf-8", "utf-8"):
        with suppress(UnicodeDecodeError):
            text = data.decode(name)
            if not (data.isascii() and _ESCAPE in data[:_SAMPLE_BYTES]):
                return text, name, True
    name, is_certain = detect_encoding(data)
    if name == "ascii":
        name = "utf-8"
    return data.decode(name, "replace"), name, is_certain


def title_from_path(path: str) -> str:
    """Return a title made of a file's name: ``notes/list-of_lights.csv`` gives "list of lights"."""
    stem = PurePath(path).stem
    return re.sub(r"[-_\s]+", " ", stem).strip() or PurePath(path).name


def _marked_encoding(data: bytes) -> str | None:
    return next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), None)


def _unmarked_utf16(sample: bytes) -> str | None:
    """Return the encoding of UTF-16 without a byte order mark, or None if it is another one.

    In Western text in UTF-16 every other byte is zero.
    """
    if len(sample) < 4 or b"\0" not in sample:
        return None
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    half = len(sample) // 2
    if odd > 0.6 * half and even < 0.02 * half:
        return "utf-16-le"
    if even > 0.6 * half and odd < 0.02 * half:
        return "utf-16-be"
    return None


MAX_FILE_BYTES = 50_000_000

_MARKDOWN_ENDINGS = ".md .mdx .markdown .mkd .qmd .rmd"
_CODE_ENDINGS = (
    ".py .pyi .js .jsx .mjs .ts .tsx .java .kt .scala .c .h .cc .cpp .hpp .cs .go .rs .rb .php .pl"
    " .swift .m .r .jl .lua .sh .bash .zsh .fish .ps1 .sql .css .scss .less .vue .toml .yaml .yml"
    " .ini .cfg .conf .env .properties .gradle .cmake .mk .dockerfile .proto .graphql .tf .tex"
    " .bib .xml .xsd"
)
_MARKDOWN = frozenset(_MARKDOWN_ENDINGS.split())
_CODE = frozenset(_CODE_ENDINGS.split())
_TEXT_ENDINGS = frozenset(".html .htm .xhtml .csv .tsv .json .jsonl .ndjson .ipynb".split())
_CHARSET_SEARCH_BYTES = 4096
_BINARY_FORMATS = {
    ".doc": "Word's format before 2007: save it as .docx",
    ".xls": "Excel's format before 2007: save it as .xlsx",
    ".ppt": "PowerPoint's format before 2007: save it as .pptx",
    ".xlsb": "a binary workbook: save it as .xlsx",
    ".mobi": "a Kindle book: convert it to .epub",
    ".azw3": "a Kindle book: convert it to .epub",
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of a format: a function of (bytes, name) in a module of this package.

    ``library`` is the module that the reader imports, ``needs`` is the package that it belongs to,
    and ``extra`` is the extra of ragaccel that brings it.
    """

    module: str
    function: str
    library: str = ""
    needs: str = ""
    extra: str = "office"

    def read(self, data: bytes, name: str) -> Document:
        """Return the document of a file's bytes, read in this process without limits."""
        if self.library:
            try:
                import_module(self.library)
            except ImportError:
                raise MissingExtraError(self.needs, self.extra) from None
        function = getattr(import_module(f"{__package__}.{self.module}"), self.function)
        document: Document = function(data, name)
        return document


_HTML = Reader("html", "read_html")
_CSV = Reader("tabular", "read_csv")
_JSON_LINES = Reader("tabular", "read_json_lines")
_MARKDOWN_READER = Reader("markdown", "read_markdown")
_XLSX = Reader("office", "read_xlsx", "openpyxl", "openpyxl, which reads Excel files,")
_ODF = "lxml.etree", "lxml, which reads OpenDocument files,"
_DOCX = "docx", "python-docx, which reads Word files,"
_PPTX = "pptx", "python-pptx, which reads PowerPoint files,"
_RTF = "striprtf.striprtf", "striprtf, which reads Rich Text files,"
READERS = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _HTML),
    **dict.fromkeys((".csv", ".tsv"), _CSV),
    ".json": Reader("tabular", "read_json"),
    **dict.fromkeys((".jsonl", ".ndjson"), _JSON_LINES),
    ".ipynb": Reader("tabular", "read_notebook"),
    ".eml": Reader("mail", "read_eml"),
    ".pdf": Reader("pdf", "read_pdf", "pypdf", "pypdf, which reads PDF files,", "pdf"),
    ".docx": Reader("office", "read_docx", *_DOCX),
    ".pptx": Reader("office", "read_pptx", *_PPTX),
    **dict.fromkeys((".xlsx", ".xlsm"), _XLSX),
    ".odt": Reader("office", "read_odt", *_ODF),
    ".odp": Reader("office", "read_odp", *_ODF),
    ".ods": Reader("office", "read_ods", *_ODF),
    ".epub": Reader("office", "read_epub", "lxml.etree", "lxml, which reads EPUB books,"),
    ".rtf": Reader("office", "read_rtf", *_RTF),
}


@dataclass(slots=True)
class Lines:
    """The lines of a document in the making, each with its line number in the file.

    ``size`` is the number of characters so far, and ``page_starts`` are the offsets of pages.
    """

    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    page_starts: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, text: str, number: int) -> None:
        """Add one or several lines with the same number."""
        self.size += len(text) + 1
        check_text_size(self.size)  # a long column name is repeated in every row
        for line in text.split("\n"):
            self.texts.append(line)
            self.numbers.append(number)

    def replace_rows(self, first: int, rows: Sequence[str]) -> None:
        """Replace a table's head, line ``first``, and the rows below by ``rows``."""
        after = first + len(rows) + 1
        self.size += sum(map(len, rows)) - sum(map(len, self.texts[first:after])) - 1
        check_text_size(self.size)
        self.texts[first:after] = rows
        del self.numbers[first]

    def document(self, name: str, title: str = "", markup: str = "markdown") -> Document:
        """Return all lines as a document."""
        return Document(
            path=name,
            text="\n".join(self.texts),
            title=title,
            page_starts=tuple(self.page_starts),
            markup=markup,
            line_numbers=tuple(self.numbers),
        )


def document_of_pages(
    name: str, pages: Iterable[str], title: str = "", markup: str = "markdown"
) -> Document:
    """Return the document of pages' texts, with a blank line after every page that has text."""
    texts = [f"{page}\n\n" if page else "" for page in pages]
    starts = tuple(accumulate(map(len, texts), initial=0))[:-1]
    return Document(name, "".join(texts), title, starts, markup)


def collapse_spaces(text: str) -> str:
    """Replace every run of white space in a text by one space."""
    return " ".join(text.split())


class BinaryFileError(DocumentError):
    """A file that holds no text; it is skipped and counted, not reported as a failure."""


def read_document(
    path: str | Path, *, name: str | None = None, max_bytes: int = MAX_FILE_BYTES
) -> Document:
    """Read a file and return its text as a document.

    Args:
        path: The file.
        name: The document's name, e.g. its path inside a folder; None: the path itself.
        max_bytes: The maximum size of the file.

    Raises:
        DocumentError: The file is missing, unreadable, broken or too large; the message says why.
        BinaryFileError: The file is neither text nor in a supported format.
        MissingExtraError: The format needs an optional dependency.
    """
    path = Path(path)
    with DocumentReader() as reader:
        return reader.read(read_bytes(path, max_bytes), name or str(path))


class DocumentReader(ReaderProcess):
    """A reader of files' bytes, one file after another; close it at the end.

    Text, Markdown and code are read in this process. The formats in ``READERS`` are read in the
    separate process, which starts with the first such file or with ``prepare_for``.
    """

    def prepare_for(self, names: Iterable[str]) -> None:
        """Start the reading process without waiting for it, if one of the files needs it."""
        readers = [READERS[suffix] for suffix in map(_suffix, names) if suffix in READERS]
        if readers:
            libraries = dict.fromkeys(reader.library for reader in readers)
            self.prepare(filter(None, libraries))

    def read(self, data: bytes, name: str) -> Document:
        """Make a document of a file's bytes, in the format of its name's suffix.

        Raises:
            DocumentError: The file is broken, or takes more time or memory than allowed.
            BinaryFileError: The file is neither text nor in a supported format.
            MissingExtraError: The format needs an optional dependency.
        """
        if needs_process(name):
            return super().read(data, name)
        began = time.thread_time()
        document = document_from_bytes(data, name)
        self.seconds = time.thread_time() - began
        return document


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES, *, inside: Path | None = None) -> bytes:
    """Read a whole file; raise a DocumentError that says why it cannot be read.

    ``inside`` is a folder above the file; symbolic links below it are not followed.
    """
    try:
        return read_regular_file(path, max_bytes, inside=inside)
    except TooLargeError as error:
        raise DocumentError(
            f"{error.size / 1e6:,.0f} MB is over the limit of {max_bytes / 1e6:,.0f} MB a file:"
            " split it, exclude it, or raise max_file_bytes"
        ) from None
    except PermissionError:
        raise DocumentError("no permission to read it") from None
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}") from error


def document_from_bytes(data: bytes, name: str) -> Document:
    """Make a document of a file's bytes in this process, without limits of time and memory.

    Use it for trusted files only, and a ``DocumentReader`` for others.
    """
    suffix = _suffix(name)
    reader = READERS.get(suffix)
    if reader is None:
        return _read_text(data, name, suffix)
    try:
        document = reader.read(data, name)
    except (DocumentError, MissingExtraError, MemoryError):
        raise
    except Exception as error:  # parsers raise many types of errors
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if "allocation failed" in reason:  # libxml2's message
            raise MemoryError from error
        raise DocumentError(f"broken {suffix[1:]} file: {_replace_surrogates(reason)}") from error
    return replace(
        document, text=_replace_surrogates(document.text), title=_replace_surrogates(document.title)
    )


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can express but UTF-8 cannot."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def read_warning(data: bytes, name: str) -> str:
    """Return a warning if a file's encoding is uncertain, else an empty string."""
    suffix = _suffix(name)
    if suffix in READERS and suffix not in _TEXT_ENDINGS:
        return ""
    declares = READERS.get(suffix) is _HTML and b"charset" in data[:_CHARSET_SEARCH_BYTES]
    return "" if declares else encoding_warning(data)


def needs_process(name: str) -> bool:
    """Return whether a file of this name is read in the separate process, which starts slowly."""
    return _suffix(name) in READERS


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _read_text(data: bytes, name: str, suffix: str) -> Document:
    if looks_binary(data):
        raise BinaryFileError(_BINARY_FORMATS.get(suffix, "a binary file"))
    if suffix in _MARKDOWN:
        return _MARKDOWN_READER.read(data, name)
    text, _ = decode_text(data)
    if suffix == ".rst":
        return Document(path=name, text=text, markup="rst")
    if suffix in _CODE:
        return Document(path=name, text=text, title=name, markup="code")
    return Document(path=name, text=text)
