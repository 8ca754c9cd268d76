"""Every Python block of the documentation runs, and every link of all pages leads somewhere."""

import re
from pathlib import Path

import pytest
import typer

import ragaccel
from ragaccel.cli.main import app
from ragaccel.quotes import REFUSAL

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SLOW = "langchain", "llamaindex", "drafters", "many"  # frameworks, all kernels, 100 questions
REFUSED = "not-answered", "space"  # pages with a question that is not answered
PAGES = [*DOCS, *sorted((ROOT / "integrations").glob("*/README.md"))]  # these run in their suites
LINKED = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *PAGES,
    *sorted((ROOT / "eval").glob("*.md")),
    *sorted((ROOT / "ragaccel").rglob("*.md")),
    *sorted((ROOT / "demos").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
PACKAGED = [*sorted((ROOT / "integrations").glob("*/README.md"))]
LINK = r"!?\[[^\]]*\]\(((?!https?:)[^)\s]+)[^)]*\)"
HAS_READER = (ROOT / "ragaccel" / "models" / "reader" / "model.safetensors").exists()


@pytest.mark.skipif(not HAS_READER, reason="the bundled reader is not in this checkout")
@pytest.mark.usefixtures("no_event_loop_is_left")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW))
        for page in [ROOT / "README.md", *DOCS]
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run_one_after_another(page, tmp_path, monkeypatch, capsys):
    names, printed = {"__name__": "documentation"}, ""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path))
    for number, block in enumerate(blocks_of(page), 1):
        for framework in ("langchain_ragaccel", "llama_index.llms.ragaccel", "fastapi"):
            if framework in block:
                pytest.importorskip(framework)
        exec(compile(block, f"block {number} of {page.name}", "exec"), names)
        printed += capsys.readouterr().out
    assert printed.strip() or not blocks_of(page)
    assert "False" not in printed
    assert REFUSAL not in printed or page.stem in REFUSED


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_what_a_page_links_to_is_there():
    for page in LINKED:
        for target in re.findall(LINK, page.read_text(encoding="utf-8")):
            file, _, heading = target.partition("#")
            linked = page.parent / file if file else page
            assert page not in PACKAGED or not file, f"{target}: PyPI shows {page} alone"
            assert linked.exists(), f"{target} of {page} is missing"
            if heading:
                assert heading in anchors_of(linked.read_text(encoding="utf-8")), target


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    described = re.findall(r"^::: (.*)$", text, flags=re.MULTILINE)  # headings on the site
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings} | {
        *described
    }


def test_every_public_name_is_documented_and_used_in_an_example():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    for name in ragaccel.__all__:
        (page,) = [page for page in pages if f"\n::: ragaccel.{name}\n" in f"{page}\n"]
        used = " ".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
        assert len(re.findall(rf"\b{name}\b", used)) > 1, name  # imported, and used


PROGRAMS = "texts streaming many retriever chat embedder".split()


@pytest.mark.parametrize("guide", PROGRAMS)
def test_a_guide_begins_with_a_program_of_at_most_twelve_lines(guide):
    program = blocks_of(ROOT / "docs" / "guides" / f"{guide}.md")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 12


def test_the_commands_and_options_that_pages_name_are_there():
    for page in [ROOT / "README.md", *DOCS]:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"(?:^|`)ragaccel ([a-z][^`\n#]*)", text, flags=re.MULTILINE):
            command, words = typer.main.get_command(app), line.split()
            while words and (subcommands := getattr(command, "commands", None)):
                assert words[0] in subcommands, f"ragaccel {line} in {page}"
                command = subcommands[words.pop(0)]
            options = {name for one in command.params for name in one.opts} | {"--help"}
            named = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
            assert named <= options, f"ragaccel {line} in {page}"


def test_there_is_documentation():
    names = {page.stem for page in PAGES}
    assert names >= {"coming-from", "custom-generate", "langchain", "llamaindex", "README"}
    assert sum(len(blocks_of(page)) for page in DOCS) >= 12
    assert blocks_of(ROOT / "README.md")
