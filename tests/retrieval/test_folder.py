"""Listing a folder: which files are listed, which are skipped, and why."""

import os

from ragaccel.retrieval import IgnoreRules, list_folder


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def listed(root, **patterns):
    return [file.name for file in list_folder(root, **patterns).files]


def test_hidden_ignored_pictures_and_special_files_are_counted(tmp_path):
    make(tmp_path, "a.md", "b c/ü 🙂.txt", ".hidden", ".git/config", "pic.PNG", "node_modules/x.js")
    make(tmp_path, "out/a.txt", "keep.log", "b.log", ".ragaccel/index.db")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/out/\n# comment\n\n")
    os.mkfifo(tmp_path / "pipe.txt")
    listing = list_folder(tmp_path)
    assert [file.name for file in listing.files] == ["a.md", "b c/ü 🙂.txt", "keep.log"]
    assert listing.skipped == {"hidden": 3, "ignored": 3, "not a document": 1, "special file": 1}


def test_nested_ignore_files_and_include_exclude(tmp_path):
    make(tmp_path, "a.md", "a.txt", "sub/b.md", "sub/c.md", "sub/deep/d.md")
    (tmp_path / "sub/.ragaccelignore").write_text("b.md\n")
    assert listed(tmp_path) == ["a.md", "a.txt", "sub/c.md", "sub/deep/d.md"]
    assert listed(tmp_path, include=["*.md"], exclude=["deep/"]) == ["a.md", "sub/c.md"]


def test_link_loops_end_and_real_paths_win(tmp_path):
    make(tmp_path, "z/file.md")
    (tmp_path / "a-link").symlink_to(tmp_path / "z", target_is_directory=True)
    (tmp_path / "z/loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "broken.md").symlink_to(tmp_path / "missing")
    (tmp_path / "a.md").symlink_to(tmp_path / "z/file.md")
    (tmp_path / "z/.hidden.md").write_text("its link alone is not hidden")
    (tmp_path / "c.md").symlink_to(tmp_path / "z/.hidden.md")
    listing = list_folder(tmp_path)
    assert [file.name for file in listing.files] == ["c.md", "z/file.md"]
    assert listing.skipped == {
        "link to a folder listed already": 2,
        "link to a file listed already": 1,
        "broken link": 1,
        "hidden": 1,
    }


def test_links_out_of_the_folder_are_named_and_followed_only_if_asked_for(tmp_path):
    make(tmp_path, "outside/key.txt", "outside/deep/more.md", "docs/sub/own.md", "docs/a.md")
    docs = tmp_path / "docs"
    for name, target in (
        ("key.txt", "../outside/key.txt"),
        ("more", tmp_path / "outside"),
        ("up", tmp_path),
        ("device.md", "/dev/zero"),
        ("sub/twice.md", "key.txt"),
        ("sub/key.txt", docs / "key.txt"),
        ("inside.md", "sub/own.md"),
        ("again", docs / "sub"),
    ):
        (docs / name).symlink_to(target)
    listing = list_folder(docs)
    assert [file.name for file in listing.files] == ["a.md", "sub/own.md"]
    leading_out = {name for name, why in listing.passed_over.items() if "--follow-links" in why}
    assert leading_out == {"device.md", "key.txt", "more", "sub/key.txt", "sub/twice.md", "up"}
    followed = list_folder(docs, follow_links=True)
    names = {file.name for file in followed.files}
    assert names == {"more/key.txt", "more/deep/more.md", "sub/own.md", "a.md"}
    assert not any("--follow-links" in why for why in followed.passed_over.values())
    (tmp_path / "link").symlink_to(docs)
    assert listed(tmp_path / "link") == listed(docs)


def test_ignore_files_are_read_as_safely_as_documents(tmp_path):
    make(tmp_path, "docs/a.md", "docs/sub/b.md", "rules")
    (tmp_path / "rules").write_text("a.md\n")
    (tmp_path / "docs/.gitignore").symlink_to(tmp_path / "rules")
    os.mkfifo(tmp_path / "docs/sub/.gitignore")
    (tmp_path / "docs/sub/.ragaccelignore").symlink_to("/dev/zero")
    assert listed(tmp_path / "docs") == ["a.md", "sub/b.md"]


def test_a_very_deep_folder_is_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(600):
        os.mkdir("d")
        os.chdir("d")
    open("a.md", "w").close()
    monkeypatch.chdir(tmp_path)
    assert listed(tmp_path) == ["d/" * 600 + "a.md"]


IGNORED = [
    ("*.log", "a/b.log"), ("a/*.log", "a/b.log"), ("**/b.log", "x/a/b.log"), ("a/**", "a/x/y"),
    ("a/**/z", "a/z"), ("a/**/z", "a/x/y/z"), ("a/***/z", "a/x/y/z"),
    ("**/a/**/b/*", "x/a/y/a/b/c"), ("a**c", "abbc"), ("*a*b*", "xaxbx"), ("[^o]*", "a"),
    ("[a&&b]", "&"), ("build/", "build/"), ("build/", "build/x.md"), ("b?r", "bar"),
    ("b[!o]r", "bar"), ("\\!a", "!a"), ("\\#a", "#a"), ("a[", "a["), ("[]a]", "]"),
    ("\\*\\?\\[a", "*?[a"), ("[a\\*", "[a*"), ("a ", "a"),
]  # fmt: skip
NOT_IGNORED = [
    ("/b.log", "a/b.log"), ("a/*.log", "x/a/b.log"), ("a/**", "a/"), ("**/a/**/b/*", "x/a/y/a/b"),
    ("/a**c", "a/c"), ("*a*b*", "xbxax"), ("build/", "build"), ("b[a-c]r", "b/r"), ("[]", "a"),
    ("[!]a]", "]"), ("\\*", "a"), ("#a", "#a"), ("[" * 4000, "["),
]  # fmt: skip


def test_patterns():
    """A path that ends with a slash is a folder's."""
    for expected, pairs in ((True, IGNORED), (False, NOT_IGNORED)):
        for pattern, path in pairs:
            rules = IgnoreRules([pattern])
            assert rules.ignores(path.rstrip("/"), path.endswith("/")) is expected, (pattern, path)
    assert IgnoreRules(["a[[]b"]).ignores("a[b", False)  # and no warning, which would fail the test


def test_the_last_pattern_that_matches_decides():
    rules = IgnoreRules(["*.md", "!keep.md", "keep.md"])
    assert rules.verdict("keep.md", False) is True
    assert IgnoreRules(["*.md", "!keep.md"]).verdict("keep.md", False) is False
    assert rules.verdict("a.txt", False) is None
    assert not IgnoreRules(["", "# x"])
