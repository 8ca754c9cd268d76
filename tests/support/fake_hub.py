"""A local hub with one repository: ``python fake_hub.py FOLDER CACHE`` prints JSON.

It serves the files in FOLDER as ``someone/tiny`` and looks for it in several ways; the addresses
that were requested are printed with the results. ``python fake_hub.py FOLDER`` prints its address,
then every request for a file, and serves until it is killed; a file named ``slow`` beside FOLDER
makes it send two MB in a tenth of a second. It runs in its own process, because the hub's
address must be known before huggingface_hub is imported, and tests open no sockets.
"""

import json
import os
import socket
import sys
import threading
import time
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40
ASKED: list[str] = []
SECRET = "Bearer hf_secret"


def handler(folder):
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            ASKED.append(f"{self.command} {self.path.split('?')[0]}")
            if len(sys.argv) == 2:
                print(ASKED[-1], self.headers.get("Range", ""), flush=True)
            parts = self.path.split("?")[0].strip("/").split("/")
            if len(sys.argv) > 2 and self.headers.get("Authorization") != SECRET:
                self.answer(401, b'{"error": "Invalid credentials"}')
            elif parts[:4] == ["api", "models", "someone", "tiny"]:
                found = self.tree() if "tree" in parts else self.info()
                self.answer(200, json.dumps(found).encode())
            elif parts[:3] == ["someone", "tiny", "resolve"] and "/".join(parts[4:]) in files:
                self.send_file(files["/".join(parts[4:])])
            else:
                self.answer(404, b"{}", ("X-Error-Code", "RepoNotFound"))

        def do_HEAD(self):
            self.do_GET()

        def info(self):
            siblings = [{"rfilename": n, "size": p.stat().st_size} for n, p in files.items()]
            return {"id": "someone/tiny", "sha": COMMIT, "siblings": siblings, "private": False}

        def tree(self):
            return [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": self.tag(path)}
                for name, path in files.items()
            ]

        def tag(self, path):
            return sha1(path.read_bytes()).hexdigest()

        def send_file(self, path):
            body, headers, code = path.read_bytes(), [], 200
            if start := int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-")):
                headers.append(("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}"))
                code = 206
            make_tag = sha256 if path.suffix == ".safetensors" else sha1
            self.answer(code, body[start:], *headers, tag=make_tag(body).hexdigest())

        def answer(self, code, body, *headers, tag=""):
            self.send_response(code)
            for header in headers:
                self.send_header(*header)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{tag or sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                for start in range(0, len(body), 2 << 20):
                    self.wfile.write(body[start : start + (2 << 20)])
                    if (folder.parent / "slow").exists():
                        time.sleep(0.1)

        def log_message(self, *_):
            pass

    return Handler


def look_up(name, kind, **hub):
    """Look up a name; return its files or the error, and the requests."""
    from ragaccel.errors import ModelNotFoundError
    from ragaccel.models import find_folder

    ASKED.clear()
    started = time.perf_counter()
    try:
        folder = find_folder(name, kind, hub)
        found = {"files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))}
    except ModelNotFoundError as error:
        found = {"error": str(error)}
    return {**found, "asked": list(ASKED), "seconds": time.perf_counter() - started}


def main(folder, cache):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(Path(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    os.environ.pop("HF_HUB_OFFLINE", None)
    from ragaccel.models import ADAPTER, EMBEDDER, LANGUAGE_MODEL

    hub = {"cache_dir": cache, "token": SECRET.split()[1]}
    found = {
        "no token": look_up("someone/tiny", LANGUAGE_MODEL, cache_dir=cache, token=False),
        "first": look_up("someone/tiny", LANGUAGE_MODEL, **hub),
        "cached": look_up("someone/tiny", LANGUAGE_MODEL, cache_dir=cache),
        "revision": look_up("someone/tiny", LANGUAGE_MODEL, **hub, revision="v2"),
        "adapter": look_up("someone/tiny", ADAPTER, **hub, subfolder="space"),
        "embedder": look_up("someone/tiny", EMBEDDER, **hub, revision="v3"),
        "missing": look_up("someone/nothing", LANGUAGE_MODEL, **hub),
        "no weights": look_up("someone/tiny", LANGUAGE_MODEL, **hub, subfolder="empty"),
    }
    server.shutdown()
    server.server_close()
    found["gone"] = look_up("someone/other", LANGUAGE_MODEL, **hub)
    socket.getaddrinfo = lambda *_, **__: time.sleep(60)  # a name server that never answers
    found["no name server"] = look_up("someone/other", LANGUAGE_MODEL, **hub)
    print(json.dumps(found))


def serve(folder):
    """Print the address of a hub that serves a folder, then serve it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(Path(folder)))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else serve(sys.argv[1])
