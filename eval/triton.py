"""Ask a Triton server over gRPC what an OpenAI-compatible one is asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from eval.server import FOR_THE_MOMENT, ForTheMoment, Json, OpenAiServer
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.engines.port import SamplingParams, TokenIds

if TYPE_CHECKING:
    from pipelines.serving.openai.backend import Backend

WRITTEN_CHATS = (
    "eval.apply_chat_template=true needs prompts as token ids where answers are written, and the models for text at "
    "{url} take text, to which they add BOS once more."
)
WRITTEN_CHATS_TODO = "Ask an OpenAI-compatible server: eval.url=http://host:port/v1."
TEXT_MODEL = "ensemble"
"""The Triton model that is given text, unless another is named."""


@dataclass
class TritonGrpc(OpenAiServer):
    """The models of a repository of TensorRT-LLM's layout.

    Written answers come from the model for text (`ensemble` or `tensorrt_llm_bls`), log probabilities from
    `tensorrt_llm`. It may return all logits of the prompt, which are large, so prompts are scored one at a time.

    Attributes:
        few_log_probs: whether it returns the log probabilities of a few tokens instead.
    """

    few_log_probs: bool = False
    _scoring: threading.Lock = field(default_factory=threading.Lock)

    def choose_model(self) -> None:
        """Take the model for text, and check that the server is ready.

        Raises:
            UserError: it is not.
        """
        self.model = self.model or TEXT_MODEL
        self.few_log_probs = self._sent("GET", "/models", None, 1)["few_log_probs"]

    def _once(self, method: str, path: str, body: Json | None) -> Json:
        from pipelines.serving.openai.errors import ApiError

        try:
            if body is not None and body.get("echo"):
                with self._scoring:
                    return asyncio.run(self._answer(body))
            return asyncio.run(self._answer(body))
        except ApiError as error:
            if error.status in FOR_THE_MOMENT:
                raise ForTheMoment(error.message) from None
            raise UserError(f"The server at {self.url} refused a request: {error.message}") from None
        except TimeoutError:
            raise ForTheMoment(f"no response within {self.timeout_s:g} s") from None

    def write(
        self, prompts: Sequence[str | TokenIds], limits: SamplingParams, stop: Sequence[str], progress: Progress
    ) -> list[str]:
        """Generate for every prompt; see `TextSession`.

        Raises:
            UserError: the prompts are token ids, which the models for text do not take.
        """
        if any(not isinstance(prompt, str) for prompt in prompts):
            raise UserError(WRITTEN_CHATS.format(url=self.url), todo=WRITTEN_CHATS_TODO)
        return super().write(prompts, limits, stop, progress)

    async def _answer(self, body: Json | None) -> Json:
        from pipelines.serving.openai.backend import Backend

        backend = Backend(urlsplit(self.url).netloc)
        backend.open()
        try:
            async with asyncio.timeout(self.timeout_s):
                if body is None:
                    if not await backend.ready():
                        raise ForTheMoment("the server is not ready")
                    return {"few_log_probs": await backend.takes_few_log_probs()}
                if body.get("echo"):
                    return await _scores(backend, body, few=self.few_log_probs)
                return await _text(backend, self.model, body)
        finally:
            await backend.close()


async def _scores(backend: Backend, body: Json, *, few: bool) -> Json:
    """Return the log probabilities of a prompt in the form of OpenAI's response."""
    from pipelines.serving.openai.scoring import PromptScorer

    (scores,) = await PromptScorer(backend, few=few).score([tuple(body["prompt"])])
    best = [None if each is None else dict(each) for each in scores.best]
    return {"choices": [{"logprobs": {"token_logprobs": list(scores.log_probs), "top_logprobs": best}}]}


async def _text(backend: Backend, model: str, body: Json) -> Json:
    """Return the text that the model for text answers."""
    from pipelines.serving.openai.inputs import text_inputs

    drawn = {name: body[name] for name in ("temperature", "top_p", "seed") if name in body}
    schema = json.dumps(body["response_format"]["json_schema"]["schema"]) if "response_format" in body else None
    inputs = text_inputs(body["prompt"], body["max_tokens"], body.get("stop", ()), json_schema=schema, **drawn)
    async with aclosing(backend.stream(model, inputs, ("text_output",))) as results:  # type: ignore[type-var]
        texts = [result.as_numpy("text_output").reshape(-1) async for result in results]
    return {"choices": [{"text": b"".join(part for text in texts for part in text).decode(errors="replace")}]}
