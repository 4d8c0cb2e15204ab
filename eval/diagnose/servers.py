"""Clients of what is served: the models of a Triton server one by one, and an OpenAI-compatible service."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eval.diagnose.expected import Reply, RightAnswers
from eval.diagnose.items import Item
from pipelines.domain.errors import UserError

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are.

    Attributes:
        triton: host:port of Triton's gRPC; None without.
        openai: URL up to and with /v1; None without.
        model: its name on the OpenAI-compatible server; empty for the only one.
        text_model: the Triton model that takes text.
        whole: whether the Triton models behind the one for text can be asked as well.
    """

    triton: str | None
    openai: str | None
    model: str = ""
    text_model: str = "ensemble"
    whole: bool = True


class TritonModels:
    """The models of a Triton server."""

    def __init__(self, url: str, text_model: str) -> None:
        self._url, self.text_model = url, text_model

    def ask(self, model: str, inputs: Sequence[Any], outputs: Sequence[str] = ()) -> dict[str, Any]:
        """Send one request and return the tensors of its last response, with `output_ids` of all joined.

        Raises:
            UserError: the server refuses it or does not respond.
        """
        from pipelines.serving.openai.backend import Backend as Client
        from pipelines.serving.openai.errors import ApiError

        async def responses(backend: Client) -> dict[str, Any]:
            found: dict[str, Any] = {}
            backend.open()
            try:
                async with asyncio.timeout(TIMEOUT_S), aclosing(backend.stream(model, inputs, outputs)) as results:  # type: ignore[type-var]
                    async for result in results:
                        found |= {each.name: result.as_numpy(each.name) for each in result.get_response().outputs}
            finally:
                await backend.close()
            return found

        try:
            return asyncio.run(responses(Client(self._url)))
        except ApiError as error:
            raise UserError(f"The Triton model '{model}' at {self._url} refused a request: {error.message}") from None
        except TimeoutError:
            raise UserError(f"The Triton model '{model}' at {self._url} did not answer in {TIMEOUT_S:g} s.") from None

    def continued(self, ids: Sequence[int], expected: RightAnswers) -> list[int]:
        """Return the token ids that `tensorrt_llm` continues a prompt with, without the one that ends it."""
        from pipelines.serving.openai.inputs import InputTensor, word_list

        inputs = [
            InputTensor("input_ids", "INT32", tuple(ids)),
            InputTensor("input_lengths", "INT32", (len(ids),)),
            InputTensor("request_output_len", "INT32", (expected.new_tokens,)),
            InputTensor("exclude_input_in_output", "BOOL", (True,)),
            *(InputTensor("end_id", "INT32", (token,)) for token in expected.ends[:1]),
        ]
        if more := expected.ends[1:]:
            inputs.append(word_list("stop_words_list", [[token] for token in more]))
        found = self.ask("tensorrt_llm", inputs, ("output_ids", "sequence_length"))
        answer: list[int] = found["output_ids"].reshape(-1).tolist()
        if "sequence_length" in found:
            answer = answer[: int(found["sequence_length"].reshape(-1)[0])]
        return answer[:-1] if answer and answer[-1] in expected.ends else answer

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text that `postprocessing` makes of token ids."""
        from pipelines.serving.openai.inputs import InputTensor

        inputs = [_nested(ids), InputTensor("SEQUENCE_LENGTH", "INT32", (len(ids),))]
        return b"".join(self.ask("postprocessing", inputs)["OUTPUT"].reshape(-1).tolist()).decode(errors="replace")

    def written(self, item: Item, expected: RightAnswers, stop: str | None = None) -> Reply:
        """Return what the model for text answers."""
        from pipelines.serving.openai.inputs import text_inputs

        inputs = text_inputs(item.text, expected.new_tokens, (stop,) if stop else ())
        found = self.ask(self.text_model, inputs)
        words = b"".join(found["text_output"].reshape(-1).tolist()).decode(errors="replace")
        return Reply(words, _first(found, "num_input_tokens"), _first(found, "num_output_tokens"))


def _nested(ids: Sequence[int]) -> Any:
    """Return TOKENS_BATCH, whose shape is [1, 1, tokens]: one prompt with one beam."""
    from pipelines.serving.openai.inputs import InputTensor

    return InputTensor("TOKENS_BATCH", "INT32", ids, (1, len(ids)))


def _first(found: Mapping[str, Any], name: str) -> int | None:
    values = found.get(name)
    return None if values is None or values.size == 0 else int(values.reshape(-1)[0])


class OpenAiService:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, model: str) -> None:
        self._parts, self._url = urlsplit(url), url
        self._model = model or self._only_model()
        self.text_model = "completions"

    def written(self, item: Item, expected: RightAnswers, stop: str | None = None) -> Reply:
        """Return what it answers to a prompt, or to messages."""
        body: dict[str, Any] = {"model": self._model, "max_tokens": expected.new_tokens, "temperature": 0}
        body |= {"stop": stop} if stop else {}
        if item.messages is None:
            reply = self._sent("POST", "/completions", {**body, "prompt": item.text})
            text = reply["choices"][0]["text"]
        else:
            reply = self._sent(
                "POST", "/chat/completions", {**body, "messages": [dict(each) for each in item.messages]}
            )
            text = reply["choices"][0]["message"]["content"]
        usage = reply.get("usage") or {}
        return Reply(str(text or ""), usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def _only_model(self) -> str:
        names = [str(each["id"]) for each in self._sent("GET", "/models", None).get("data", [])]
        if len(names) != 1:
            raise UserError(f"The server at {self._url} has {len(names)} models.", todo="Name one with eval.model.")
        return names[0]

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request.

        Raises:
            UserError: the server does not respond, or refuses it.
        """
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=TIMEOUT_S)
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, self._parts.path.rstrip("/") + path, content, headers)
            response = connection.getresponse()
            raw = response.read()
            reply = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"The server at {self._url} did not answer: {said}.", todo="Check eval.url.") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK or not isinstance(reply, dict):
            shown = raw[:300].decode(errors="replace")
            raise UserError(f"The server at {self._url} refused a request with HTTP status {response.status}: {shown}")
        return reply
