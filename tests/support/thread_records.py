"""Record the threads in which methods of a class are called."""

import threading


def record_threads(monkeypatch, kind, names):
    """Return a set to which every call of these methods adds its thread's id."""
    seen = set()
    for name in names:
        asked = getattr(kind, name)

        def watched(self, *args, _asked=asked, **options):
            seen.add(threading.get_ident())
            return _asked(self, *args, **options)

        monkeypatch.setattr(kind, name, watched)
    return seen
