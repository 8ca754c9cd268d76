"""Copy the family photographs to the two disks.

Written for the old laptop in the study, runs every Sunday at 21:00 from cron.

What goes where
---------------
The disk called ALDER stays plugged in. The disk called BIRCH is brought home from the
office on the first weekend of a month and goes back on the Monday, so that a fire does
not take both.

The folder scans-raw is skipped because it is larger than everything else
together and the negatives still exist.
Videos above 4 GB are copied to ALDER only.

When it fails
-------------
A mail goes to both of us. The usual reasons, in this order: the disk is full, the disk
is asleep, the cable is loose. After three failed Sundays the script stops and waits for
somebody to delete the file STOP in its folder.

How to get something back
-------------------------
Plug in the disk and copy. There is no archive and no password: that was on purpose, so
that Mum can do it too. Deleted pictures are kept for 180 days in the folder called
attic.
"""

import shutil
import sys
from pathlib import Path

SOURCE = Path.home() / "Pictures"
LIMIT = 4 * 1024**3  # bytes; larger videos go to ALDER only
SKIPPED = {"scans-raw", ".thumbnails"}


def copy_new(target: Path, large: bool) -> int:
    """Copy what the disk does not have yet; return the number of files copied."""
    copied = 0
    for path in SOURCE.rglob("*"):
        if not path.is_file() or SKIPPED & set(path.parts):
            continue
        if path.stat().st_size > LIMIT and not large:
            continue
        place = target / path.relative_to(SOURCE)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
            copied += 1
    return copied


if __name__ == "__main__":
    for disk in sys.argv[1:]:
        print(disk, copy_new(Path(disk), large="ALDER" in disk))
