"""A server with the used part of vLLM's protocol on a tiny model.

Like vLLM it loads safetensors into a fixed architecture, samples with a generator seeded by the
request, and caches the logits of a prompt, also across reloads.
"""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class VLLMServerOfTests:
    """A server and its state; tests set its faults."""

    def __init__(self, model: PreTrainedModel, *, port: int = 0) -> None:
        self.model = copy.deepcopy(model).eval()
        self.processed_logprobs = True
        self.dev_mode = True
        self.keeps_its_head = False
        """As vLLM 0.32.0 does on a CPU if the head is tied to the embeddings."""
        self.max_model_len = 64
        self.tokens_too_many = 0
        self.busy_answers = 0
        """Calls that are answered with status 503."""
        self.loaded: list[str] = []
        """Names of the folders that were loaded."""
        self.completions: list[dict[str, Any]] = []
        self._first_logits: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if self.busy_answers:
                self.busy_answers -= 1
                return 503, {"error": {"message": "still loading"}}
            if path == "/v1/models":
                card = {"id": "tiny", "object": "model", "max_model_len": self.max_model_len}
                return 200, {"object": "list", "data": [card]}
            if path == "/v1/completions":
                self.completions.append(body)
                return 200, {"object": "text_completion", "choices": [self._complete(body)]}
            if path == "/collective_rpc" and self.dev_mode and body["method"] == "reload_weights":
                return self._reload(Path(body["kwargs"]["weights_path"]))
        return 404, {"detail": "Not Found"}

    def _reload(self, folder: Path) -> tuple[int, dict[str, Any]]:
        weights = {
            k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()
        }
        assert weights, f"{folder} holds no weights"
        if self.keeps_its_head:
            weights["lm_head.weight"] = self.model.lm_head.weight.detach().clone()
        try:
            found = self.model.load_state_dict(weights, strict=False)
            assert not found.unexpected_keys, found.unexpected_keys
            assert set(found.missing_keys) <= {"lm_head.weight"}, found.missing_keys
        except (AssertionError, RuntimeError) as error:
            return 500, {"error": {"message": f"EngineCore failed: {error}"}}
        self.model.tie_weights()
        self.loaded.append(folder.name)
        return 200, {"results": [None]}

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0
        assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)
        greedy = body["temperature"] == 0
        cut = LogitsProcessorList()
        if not greedy:
            cut.append(TemperatureLogitsWarper(body["temperature"]))
        if body["top_k"] > 0:
            cut.append(TopKLogitsWarper(body["top_k"]))
        if body["top_p"] < 1:
            cut.append(TopPLogitsWarper(body["top_p"]))
        generator = torch.Generator().manual_seed(body["seed"])
        ids: list[int] = []
        logprobs: list[float] = []
        ended = False
        while len(ids) < body["max_tokens"] + self.tokens_too_many and not ended:
            raw = self._logits(body["cache_salt"], body["prompt"], ids)
            drawn_from = cut(torch.tensor([body["prompt"] + ids]), raw[None])[0].log_softmax(-1)
            token = (
                int(raw.argmax())
                if greedy
                else int(torch.multinomial(drawn_from.exp(), 1, generator=generator))
            )
            kept = drawn_from if self.processed_logprobs else raw.log_softmax(-1)
            ids.append(token)
            logprobs.append(float(kept[token]))
            ended = token in body["stop_token_ids"]
        return {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if ended else "length",
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs, "tokens": [""] * len(ids)},
        }

    def _logits(self, salt: str, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """Return the logits of the next token; those after the prompt come from the cache."""
        key = (salt, tuple(prompt))
        if not ids and key in self._first_logits:
            return self._first_logits[key]
        logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].float()
        if not ids:
            self._first_logits[key] = logits
        return logits


def _handler(server: VLLMServerOfTests) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            status, answer = server.answer(self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def vllm_server(model: PreTrainedModel) -> Iterator[VLLMServerOfTests]:
    """Run a server while the context lasts, unless the test stops it earlier."""
    server = VLLMServerOfTests(model)
    try:
        yield server
    finally:
        server.stop()
