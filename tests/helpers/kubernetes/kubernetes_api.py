"""A stand-in of the Kubernetes API on 127.0.0.1, which stores objects and gives them back."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

COLLECTIONS = ("/workflowtemplates", "/cronworkflows", "/workflows", "/sensors")
"""Ends of the addresses of all objects of a kind."""


@dataclass
class Cluster:
    """What the API has stored, and how to reach it."""

    kubeconfig: Path
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects by the path of their address; a name is made of `generateName` and 1."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""


@contextmanager
def kubernetes_api(folder: Path) -> Iterator[Cluster]:
    """Serve the API while the context lasts; `folder` gets the kubeconfig of its clients."""
    cluster = Cluster(folder / "kubeconfig")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(COLLECTIONS):
                return self.answer_found(cluster.objects.get(self.path))
            inside = f"{self.path}/"
            found = [one for path, one in cluster.objects.items() if path.startswith(inside)]
            self.answer({"kind": "List", "metadata": {}, "items": found}, 200)

        def do_POST(self) -> None:
            metadata = (body := self.body())["metadata"]
            metadata["name"] = metadata.get("name") or metadata["generateName"] + "1"
            metadata["creationTimestamp"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            self.store(f"{self.path}/{metadata['name']}", body, 201)

        def do_PUT(self) -> None:
            # Kubernetes keeps the time, and creates no object of Argo in this way.
            if (old := cluster.objects.get(self.path)) is None:
                return self.answer_found(None)
            created = old["metadata"]["creationTimestamp"]
            body = self.body()
            body["metadata"]["creationTimestamp"] = created
            self.store(self.path, body)

        def do_DELETE(self) -> None:
            self.answer_found(cluster.objects.pop(self.path, None))

        def body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def store(self, path: str, body: Any, status: int = 200) -> None:
            old = cluster.objects.get(path, {"metadata": {"resourceVersion": "0"}})
            version = old["metadata"]["resourceVersion"]
            # Kubernetes refuses to replace a version that the client has not read.
            if version != body["metadata"].get("resourceVersion", "0"):
                return self.answer({"message": "another version is stored"}, 409)
            body["metadata"]["resourceVersion"] = str(int(version) + 1)
            cluster.objects[path] = body
            self.answer(body, status)

        def answer_found(self, found: Any) -> None:
            if found is None:
                return self.answer({"message": "not found"}, 404)
            self.answer(found, 200)

        def answer(self, body: Any, status: int) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_request(self, *_: Any) -> None:
            cluster.requests.append((self.command, self.path))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster.kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "clusters": [
                    {
                        "name": "test",
                        "cluster": {"server": f"http://127.0.0.1:{server.server_port}"},
                    }
                ],
                "users": [{"name": "test", "user": {"token": "test"}}],
            }
        )
    )
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
