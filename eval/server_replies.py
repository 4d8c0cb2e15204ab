"""Read the replies of an OpenAI-compatible server: log probabilities and texts."""

from __future__ import annotations

import math
from typing import Any

from pipelines.domain.errors import UserError

Json = dict[str, Any]

SCORING_TODO = (
    "Scoring needs /v1/completions with prompts as token ids, echo and logprobs; a server without them can be asked"
    " tasks whose answers are written, e.g. eval=mini_answers or eval=gsm8k."
)


TOP_TODO = (
    "Fidelity needs /v1/completions with prompts as token ids, echo, logprobs and return_tokens_as_token_ids, as vLLM"
    " and this project's service have them. Ask for no more than the server gives (fidelity.top_logprobs), in windows"
    " that it takes (fidelity.window)."
)


def todo_of(body: Json | None) -> str:
    """Return what to do about a request that was refused."""
    if not body or not body.get("echo"):
        return "Check eval.url and eval.model."
    return TOP_TODO if "return_tokens_as_token_ids" in body else SCORING_TODO


def read_top_logprobs(reply: Json, length: int, top: int) -> Json:
    """Read the likeliest tokens of an echoed prompt; see `OpenAiServer.top_logprobs`.

    Args:
        reply: the response.
        length: tokens of the prompt.
        top: how many were asked for.

    Raises:
        UserError: the response lacks them, or has fewer.
    """
    try:
        found = reply["choices"][0]["logprobs"]
        own, places = found["token_logprobs"], found["top_logprobs"]
        if not length <= len(own) <= length + 1 or len(places) != len(own):  # the last one is of the new token
            raise ValueError(f"{len(own)} log probabilities for {length} tokens")
        own = [float(score) for score in own[1:length]]
        best = [sorted(place.items(), key=lambda pair: -float(pair[1]))[:top] for place in places[1:length]]
        ids = [[_token_id(name) for name, _ in place] for place in best]
        logprobs = [[float(score) for _, score in place] for place in best]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"The server's response has no log probabilities of the likeliest tokens of the prompt, by token id:"
            f" {type(error).__name__}: {error}.",
            todo=TOP_TODO,
        ) from None
    if (fewest := min(map(len, ids), default=top)) < top:
        raise UserError(f"The server returned {fewest} log probabilities of {top} at a position.", todo=TOP_TODO)
    if wrong := [
        score for score in (*own, *(each for place in logprobs for each in place)) if not math.isfinite(score)
    ]:
        raise UserError(f"The server returned {wrong[0]} as a log probability.")
    return {"ids": ids, "logprobs": logprobs, "own": own}


def _token_id(name: str) -> int:
    start, _, number = name.partition(":")
    if start != "token_id" or not number.isdigit():
        raise ValueError(f"'{name[:40]}' is not of the form token_id:5")
    return int(number)


def read_score(reply: Json, context: int, length: int) -> tuple[float, bool]:
    """Read the log probability of a continuation from an echoed prompt, as lm-eval's `local-completions` does.

    Raises:
        UserError: the response has no log probabilities of the prompt.
    """
    try:
        found = reply["choices"][0]["logprobs"]
        scores, best = found["token_logprobs"], found["top_logprobs"]
        if not length <= len(scores) <= length + 1:  # the last one is of the new token
            raise ValueError(f"{len(scores)} log probabilities for {length} tokens")
        own = [float(score) for score in scores[context:length]]
        greedy = all(score == max(top.values()) for score, top in zip(own, best[context:length], strict=True))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"The server's response has no log probabilities of the prompt: {type(error).__name__}: {error}.",
            todo=SCORING_TODO,
        ) from None
    if not all(map(math.isfinite, own)):
        raise UserError(f"The server returned {own} as log probabilities.")
    return sum(own), greedy


def read_text(reply: Json) -> str:
    """Read a written answer.

    Raises:
        UserError: the response has none.
    """
    try:
        return str(reply["choices"][0]["text"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"The server's response has no text: {type(error).__name__}: {error}.") from None
