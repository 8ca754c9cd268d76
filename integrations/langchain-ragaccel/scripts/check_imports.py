"""Check imports: loads each file given, by itself; exit status 1 and the errors if one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def error_of(path: str) -> str:
    """The error of importing a file in a new process; empty if there is none."""
    module = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    return f"{path}:\n{done.stderr}" if done.returncode else ""


if __name__ == "__main__":
    errors = [error for path in sys.argv[1:] if (error := error_of(path))]
    sys.stderr.write("\n".join(errors))
    sys.exit(bool(errors))
