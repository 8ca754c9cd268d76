"""``python -m ragaccel``: the command line."""

from ragaccel.cli.main import run

if __name__ == "__main__":
    run()
