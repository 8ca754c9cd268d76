"""What the packages say of themselves: true, complete, and without an address that was made up."""

import re
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT / "pyproject.toml", *sorted((ROOT / "integrations").glob("*/pyproject.toml"))]
PAGES = [
    path
    for path in (*ROOT.rglob("*.md"), *ROOT.rglob("*.cff"), *PROJECTS)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    and not {"results", "site"} & {*path.parts}
    and path not in (PROJECTS[0], ROOT / "docs" / "publishing.md")
]
OTHERS = {  # whose pages ours may name
    "arxiv.org", "download.pytorch.org", "doi.org", "github.com", "huggingface.co",
    "keepachangelog.com", "localhost:11434", "localhost:8000",
}  # fmt: skip


def project_of(path):
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def address():
    return project_of(PROJECTS[0])["urls"]["Repository"]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_a_package_says_for_whom_and_where_it_is(path):
    project = project_of(path)
    classifiers = project["classifiers"]
    oldest = re.match(r">=(3\.\d+)", project["requires-python"]).group(1)
    versions = [one.rpartition(" ")[2] for one in classifiers if ":: Python :: 3." in one]
    assert versions[0] == oldest
    assert versions == [f"3.{minor}" for minor in range(10, 10 + len(versions))]
    assert any(one.startswith("Operating System ::") for one in classifiers)
    assert not any(one.startswith("License ::") for one in classifiers)  # PEP 639: one or the other
    assert project["license"] == "Apache-2.0"
    assert sorted(classifiers) == sorted(set(classifiers))
    for person in (*project["authors"], *project["maintainers"]):
        assert person.keys() == {"name"}


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_classifiers_are_those_of_the_index(path):
    trove = pytest.importorskip("trove_classifiers")
    assert set(project_of(path)["classifiers"]) <= trove.classifiers


def test_our_address_stands_in_one_place_until_there_is_one():
    urls = [value for path in PROJECTS for value in project_of(path).get("urls", {}).values()]
    assert all(url.startswith(address()) for url in urls)
    if ".invalid" in address():
        assert urls == [address()]


def test_no_other_address_of_ours_was_made_up():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        hosts = set(re.findall(r"https?://([^/\s)`\"'<>]+)", text))
        assert hosts - OTHERS <= {address().partition("//")[2]}, path
        ours = r"(?:github\.com|huggingface\.co|gitlab\.com)/[\w.-]*ragaccel"
        assert not re.search(ours, text), path
        assert not re.search(r"[\w.]+@[\w-]+\.(?:com|org|dev|io|net)\b", text), path
