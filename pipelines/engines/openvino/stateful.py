"""Run the engine's graph statefully, one sequence at a time: slower than the paged pipeline, but with logits."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.memory import usual_kv_precision
from pipelines.engines.openvino.prompt_table import NAME, PromptTable, with_table_input
from pipelines.engines.openvino.runtime import FIRST_TOKENS, EngineFolder, OpenVinoOptions, properties

Array = np.ndarray[Any, Any]

LAST_ATTENTION = ".attention_residual"
"""End of the name of the node after which no token of a layer depends on another."""
MAX_LOGITS = 2**26
"""Most logits held at once, 256 MiB of float32."""


class StatefulModel:
    """The compiled graph; sequences share its weights."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        """Load and compile.

        The KV state has the type of the paged cache: values of an 8-bit one are already rounded by the graph.
        """
        core = ov.Core()
        self.no_table = None
        if folder.limits.max_prompt_embedding_table_size:
            self.no_table = np.zeros((1, folder.config.hidden_size), dtype=np.float32)
        self.piece = min(folder.limits.max_num_tokens, max(1, MAX_LOGITS // folder.config.vocab_size))
        with folder.loading():
            model = with_table_input(with_chosen_logits(folder.read_model()))
            self.compiled = core.compile_model(
                model, "CPU", properties(folder.config, options, usual_kv_precision(options))
            )
            first = StatefulSequence(self)
            for tokens in (FIRST_TOKENS, 1):  # as a prompt, and as each token after it
                first.feed([0] * tokens)


class StatefulSequence:
    """One sequence with its own KV state."""

    def __init__(self, model: StatefulModel, table: PromptTable | None = None) -> None:
        self._request = model.compiled.create_infer_request()
        self._table = model.no_table if table is None else table.rows
        self._piece = model.piece
        self._length = 0

    def feed(self, tokens: Sequence[int] | Array) -> Array:
        """Append tokens to the sequence; return the logits after the last one, float32 [V]."""
        *_, last = self.pieces(tokens, all_logits=False)
        return np.array(last[-1])

    def pieces(self, tokens: Sequence[int] | Array, *, all_logits: bool) -> Iterator[Array]:
        """Append tokens to the sequence.

        Yields:
            of each piece of them, the logits after every token, or only after the last one of all; float32 [N, V].
        """
        for start in range(0, len(tokens), self._piece):
            piece = np.asarray(tokens[start : start + self._piece], dtype=np.int64)
            last = start + len(piece) == len(tokens)
            rows = np.arange(len(piece))
            if not all_logits:
                rows = rows[-1:] if last else rows[:0]
            yield self._infer(piece, rows)

    def _infer(self, piece: Array, rows: Array) -> Array:
        past, self._length = self._length, self._length + len(piece)
        inputs = {
            "input_ids": piece[None],
            "attention_mask": np.ones((1, self._length), dtype=np.int64),
            "position_ids": np.arange(past, self._length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
            "logit_rows": rows.astype(np.int64),
        }
        if self._table is not None:
            inputs[NAME] = self._table
        return np.array(self._request.infer(inputs)["logits"][0], dtype=np.float32)


def with_chosen_logits(model: ov.Model) -> ov.Model:
    """Add the input `logit_rows` [N] and return logits [1, N, V] of these rows of [B * T] only.

    All that no other token depends on runs on these rows alone: the MLP of the last layer, the last norm and the head.
    """
    *_, residual = (node for node in model.get_ordered_ops() if node.get_friendly_name().endswith(LAST_ATTENTION))
    size = residual.get_output_partial_shape(0)[2].get_length()
    users = list(residual.output(0).get_target_inputs())
    chosen = op.parameter([-1], ov.Type.i64)
    chosen.set_friendly_name("logit_rows")
    chosen.get_output_tensor(0).set_names({"logit_rows"})
    flat = op.reshape(residual, np.array([1, -1, size], dtype=np.int64), special_zero=False)
    rows = op.gather(flat, chosen, np.int64(1))
    for user in users:
        user.replace_source_output(rows.output(0))
    model.add_parameters([chosen])
    model.validate_nodes_and_infer_types()
    return model


# Choose the next token from logits, which the pipeline's own sampler does not show.

NEVER = -np.inf


class TokenChooser:
    """Chooses the tokens of one sequence, in openvino_genai's order: penalties, temperature, top-k and top-p."""

    def __init__(self, request: GenerationRequest, seed: int) -> None:
        """Take the limits; `seed` replaces that of `request`."""
        self._request = request
        self._random = np.random.default_rng(seed)
        self._output: Counter[int] = Counter()
        self._history: list[int] = request.prompt.tolist()
        self._chosen = 0
        self._guided = request.guide.follow(request.end_id) if request.guide is not None else None

    @property
    def complete(self) -> bool:
        """Whether the guide lets nothing follow."""
        return self._guided is not None and self._guided.complete

    def choose(self, logits: Array) -> tuple[int, float]:
        """Return the next token and its log probability: the model's, before anything that changes the choice.

        Args:
            logits: the model's logits, float32 [V]; not modified.

        Raises:
            ValueError: the logits contain NaN, every token is excluded, or the guide is too complex.
        """
        model = logits.astype(np.float64)
        scores = self._adjusted(model.copy())
        if self._guided is not None:
            scores = np.where(self._guided.allowed(), scores, NEVER)
        top = scores.max()
        if not np.isfinite(top):
            raise ValueError(
                "no token can be chosen: the model returned NaN"
                if np.isnan(top)
                else "no token can be chosen: bad words, min_tokens and the guide exclude all"
            )
        token = self._draw(scores) if self._request.samples else int(scores.argmax())
        likeliest = model.max()
        log_prob = float(model[token] - likeliest - np.log(np.exp(model - likeliest).sum()))
        if self._guided is not None:
            self._guided.take(token)
        self._output[token] += 1
        self._history.append(token)
        self._chosen += 1
        return token, log_prob

    def _adjusted(self, scores: Array) -> Array:
        request = self._request
        if request.bias is not None:
            scores = scores + request.bias
        if request.repetition_penalty != 1:
            seen = np.fromiter({token for token in self._history if token < len(scores)}, dtype=np.int64)
            scores[seen] *= np.where(scores[seen] > 0, 1 / request.repetition_penalty, request.repetition_penalty)
        if self._output and (request.presence_penalty or request.frequency_penalty):
            tokens = np.fromiter(self._output, dtype=np.int64)
            counts = np.fromiter(self._output.values(), dtype=np.float64)
            scores[tokens] -= request.presence_penalty + request.frequency_penalty * counts
        if 0 <= request.end_id < len(scores) and self._chosen < request.min_tokens:
            scores[request.end_id] = NEVER
        for word in request.bad_words:
            *before, last = word
            if last < len(scores) and self._history[len(self._history) - len(before) :] == before:
                scores[last] = NEVER
        return scores

    def _draw(self, scores: Array) -> int:
        request = self._request
        order = np.argsort(-scores, kind="stable")[: request.top_k or None]
        ranked = scores[order] / request.temperature
        weights = np.exp(ranked - ranked[0])
        weights /= weights.sum()
        if 0 < request.top_p < 1:
            nucleus = int(np.searchsorted(np.cumsum(weights), request.top_p)) + 1
            order, weights = order[:nucleus], weights[:nucleus] / weights[:nucleus].sum()
        return int(self._random.choice(order, p=weights))
