"""Generate outputs that follow a guide: outside the paged pipeline, which does not let tokens be taken away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipelines.domain.progress import Progress
from pipelines.engines.openvino.generation_request import GenerationRequest, Guide, Guides
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.sampling import TokenChooser
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence
from pipelines.engines.port import Generation, NotFiniteError, SamplingParams, TokenIds

NO_TOKEN = -1


class GuidedGenerator:
    """Generates one prompt after another, as the server runs a guided request."""

    def __init__(self, folder: EngineFolder, model: StatefulModel, tokenizer: Path) -> None:
        """Load the vocabulary.

        Args:
            folder: the engine.
            model: its compiled graph.
            tokenizer: folder of the model's tokenizer.

        Raises:
            UserError: llguidance cannot read the tokenizer.
        """
        self.tokenizer = tokenizer
        self._guides = Guides(tokenizer, folder.config.vocab_size)
        self._model = model

    def generate(
        self, prompts: Sequence[TokenIds], limits: SamplingParams, schema: str, progress: Progress
    ) -> list[Generation]:
        """Generate for every prompt; the smallest stop token ends an output where the guide allows it.

        Args:
            prompts: token ids of each.
            limits: of each output.
            schema: JSON schema that every output follows.
            progress: counts prompts.

        Raises:
            UserError: the schema is not valid.
        """
        guide = self._guides.read("json_schema", schema)
        found = []
        with progress.task("generating", len(prompts), "requests") as advance:
            for prompt in prompts:
                found.append(_output(self._model, _request(prompt, limits, guide), limits.seed))
                advance(1)
        return found


def _request(prompt: TokenIds, limits: SamplingParams, guide: Guide) -> GenerationRequest:
    return GenerationRequest(
        np.asarray(prompt, dtype=np.int64),
        limits.max_new_tokens,
        end_id=min(limits.stop_token_ids, default=NO_TOKEN),
        temperature=limits.temperature,
        top_k=limits.top_k,
        top_p=limits.top_p,
        guide=guide,
    )


def _output(model: StatefulModel, request: GenerationRequest, seed: int) -> Generation:
    state, chooser = StatefulSequence(model), TokenChooser(request, seed)
    tokens: list[int] = []
    fed: Sequence[int] = request.prompt.tolist()
    while len(tokens) < request.max_tokens:
        logits = state.feed(fed)
        if np.isnan(logits).any():
            raise NotFiniteError("The engine", "no token can be chosen", [*request.prompt.tolist(), *tokens])
        token, _ = chooser.choose(logits)
        if token == request.end_id:
            return Generation(tokens, "stop")
        tokens.append(token)
        if chooser.complete:
            return Generation(tokens, "stop")
        fed = [token]
    return Generation(tokens, "length")
