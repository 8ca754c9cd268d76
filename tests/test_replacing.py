import os
import stat
import threading

import pytest

from ragaccel.replacing import replacing


def write(path, text, **options):
    with replacing(path, **options) as file:
        file.write(text.encode())


def write_half(path, error):
    with replacing(path) as file:
        file.write(b"half of the n")
        raise error


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_contents_take_the_place_of_the_old_ones(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write(path, "one")
    write(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["b.txt"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_private_file_is_its_owners_alone_and_another_keeps_its_mode(tmp_path):
    secret, shown = tmp_path / "secret", tmp_path / "shown"
    write(secret, "x", private=True)
    write(shown, "x")
    assert (mode(secret), mode(shown)) == (0o600, 0o644)
    shown.chmod(0o640)
    write(shown, "y")
    assert mode(shown) == 0o640


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_contents_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    write(path, "old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        write(tmp_path / "a", "x")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_several_at_once_leave_one_whole(tmp_path):
    path = tmp_path / "a"
    texts = [str(number) * 50_000 for number in range(8)]
    threads = [threading.Thread(target=write, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert len(list(tmp_path.iterdir())) == 1
