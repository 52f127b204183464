"""As much of the hub as loading models and data sets needs: each revision is a folder."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import transformers


class ModelHub(ThreadingHTTPServer):
    """Serves the files of `folders`, by `org/name@revision`; every other file is missing.

    Data sets are named `datasets/org/name@revision`.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.folders = folders
        self.names = {name: name for name in folders}
        """Key of `folders` by the same name, and by the name with the commit as its revision."""
        self.names |= {f"{name.partition('@')[0]}@{commit_of(name)}": name for name in folders}
        self.asked: set[str] = set()
        """The keys of `folders` that were asked for."""


def commit_of(name: str) -> str:
    """The commit of a revision, `org/name@revision`."""
    return hashlib.sha1(name.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: ModelHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        repository, kind, rest = self._parts()
        revision, _, file = rest.partition("/")
        name = self.server.names.get(f"{repository}@{unquote(revision)}")
        if name is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        self.server.asked.add(name)
        commit = commit_of(name)
        if kind == "revision":
            return self._send(200, json.dumps({"id": repository, "sha": commit}).encode(), {})
        folder = self.server.folders[name]
        if kind in ("tree", "paths-info"):
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            entries = [_entry(path, path.relative_to(folder).as_posix()) for path in files]
            if kind == "paths-info":
                entries = [entry for entry in entries if entry["path"] in asked.get("paths", [])]
            return self._send(200, json.dumps(entries).encode(), {})
        path = folder / file
        if kind != "resolve" or not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        return self._send(200, body, {"ETag": etag, "X-Repo-Commit": commit})

    def _parts(self) -> tuple[str, str, str]:
        """Repository, kind of the request, and what comes after: the revision, and the file."""
        path = urlsplit(self.path).path.removeprefix("/api").removeprefix("/models")
        data = "/datasets" if path.startswith("/datasets/") else ""
        _, organization, name, *more = f"{path.removeprefix(data)}//".split("/", 4)
        kind, rest = more if more[0] else ("revision", "main")
        return f"{data}/{organization}/{name}".lstrip("/"), kind, rest

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *details: object) -> None:
        pass


def _entry(path: Path, name: str) -> dict[str, object]:
    """What the hub says of a file in a list."""
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": digest}


@contextmanager
def model_hub(folders: Mapping[str, Path], cache: Path) -> Iterator[ModelHub]:
    """Send the hub's client of this process to a `ModelHub`, with a cache of its own."""
    server = ModelHub(folders)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants = {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": files,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
    }
    data = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": cache / "data"}
    try:
        with (
            patch.multiple(huggingface_hub.constants, **constants),
            patch.multiple(datasets.config, **data),
            # The client of transformers, which keeps the address of its first call.
            patch.object(transformers.utils.hub, "_hf_api", None),
            patch.dict(os.environ, {"NO_PROXY": "127.0.0.1"}),
        ):
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
