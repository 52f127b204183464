"""As much of the hub as loading a model needs, on 127.0.0.1: each revision is a folder."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch
from urllib.parse import unquote

import huggingface_hub
import transformers


class ModelHub(ThreadingHTTPServer):
    """Serves the files of `folders`: `org/name@revision` -> folder; every other file is missing."""

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

    def _answer(self) -> None:
        repository, kind, rest = self._parts()
        revision, _, file = rest.partition("/")
        name = self.server.names.get(f"{repository}@{unquote(revision)}")
        if name is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        self.server.asked.add(name)
        commit = commit_of(name)
        if kind == "revision":
            return self._send(200, json.dumps({"id": repository, "sha": commit}).encode(), {})
        path = self.server.folders[name] / file
        if kind != "resolve" or not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        return self._send(200, body, {"ETag": etag, "X-Repo-Commit": commit})

    def _parts(self) -> tuple[str, str, str]:
        """Repository, kind of the request, and what comes after: the revision, and the file."""
        _, organization, name, *more = self.path.removeprefix("/api/models").split("/", 4)
        kind, rest = more or ("revision", "main")
        return f"{organization}/{name}", kind, rest

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *details: object) -> None:
        pass


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
    try:
        with (
            patch.multiple(huggingface_hub.constants, **constants),
            # The client of transformers, which keeps the address of its first call.
            patch.object(transformers.utils.hub, "_hf_api", None),
            patch.dict(os.environ, {"NO_PROXY": "127.0.0.1"}),
        ):
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
