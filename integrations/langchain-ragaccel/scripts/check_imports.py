"""Import each given file in a new process; print errors and exit with 1 if one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def error_of(path: str) -> str:
    """Import a file in a new process and return the error, or an empty text."""
    module = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    return f"{path}:\n{done.stderr}" if done.returncode else ""


if __name__ == "__main__":
    errors = [error for path in sys.argv[1:] if (error := error_of(path))]
    sys.stderr.write("\n".join(errors))
    sys.exit(bool(errors))
