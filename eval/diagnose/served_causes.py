"""Why what is served differs: hypotheses about token ids, answers and texts; the first that fits is the cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.diagnose.expected import Reply, RightAnswers
from eval.diagnose.items import Item


def ids_cause(wrong: Sequence[tuple[Item, list[int]]], expected: RightAnswers) -> str:
    """Explain wrong token ids of prompts."""
    tokenizer = expected.tokenizer
    item, ids = wrong[0]
    right, bos, pad = list(item.ids), tokenizer.bos_token_id, tokenizer.pad_token_id
    if bos is not None and ids == [bos, *right]:
        return "the BOS token is doubled"
    if bos is not None and [bos, *ids] == right:
        return "the BOS token is missing"
    eos = tokenizer.eos_token_id
    if eos is not None and ids == [*right, eos]:
        return "an EOS token is added to the prompt"
    if pad is not None and len(ids) > len(right):
        if ids == [pad] * (len(ids) - len(right)) + right:
            return "prompts are padded on the left, and the padding is not removed"
        if ids == right + [pad] * (len(ids) - len(right)):
            return "prompts are padded on the right, and the padding is not removed"
    if all(len(given) < len(each.ids) for each, given in wrong):
        if all(given == list(each.ids[: len(given)]) for each, given in wrong):
            return f"prompts are truncated to {len(ids)} tokens, the end is lost"
        if all(given[1:] == list(each.ids[len(each.ids) - len(given) + 1 :]) for each, given in wrong):
            return f"prompts are truncated to {len(ids)} tokens, the beginning is lost"
    at = next(
        (n for n, pair in enumerate(zip(ids, right, strict=False)) if pair[0] != pair[1]), min(len(ids), len(right))
    )
    shown = [repr(tokenizer.decode(each[at : at + 1])) if at < len(each) else "nothing" for each in (ids, right)]
    return (
        f"the tokenizer is another one, or of another revision: token {at} of the {item.name} is {shown[0]}, not "
        f"{shown[1]}"
    )


def answers_cause(wrong: Sequence[tuple[Item, list[int], list[int]]], expected: RightAnswers, again: Any) -> str:
    """Explain wrong token ids of answers."""
    item, right, answer = wrong[0]
    if any(again(each.ids, expected) != given for each, _, given in wrong):
        return "the same prompt is answered differently each time: it samples, although greedy decoding was asked for"
    pairs = [(a, b) for _, a, b in wrong]
    if all(len(b) - len(a) == len(pairs[0][1]) - len(pairs[0][0]) != 0 for a, b in pairs):
        off = len(pairs[0][1]) - len(pairs[0][0])
        if all(a[: len(b)] == b or b[: len(a)] == a for a, b in pairs) and abs(off) <= 2:
            return f"answers have {abs(off)} token{'s' * (abs(off) > 1)} too {'many' if off > 0 else 'few'}"
    ended = [(a, b) for a, b in pairs if expected.ended_early(a)]
    if ended and len(ended) == len(pairs) and all(b[: len(a)] == a and len(b) > len(a) for a, b in ended):
        return "answers go on after the token that ends them: another end id is used"
    if all(b == a[: len(b)] for a, b in pairs):
        return f"answers end early, after {len(answer)} of {len(right)} tokens"
    ids = list(item.ids)
    for name, fed in misfed(ids, expected).items():
        if expected.source.answers([fed])[0][: len(answer)] == answer:
            return name
    return "the served engine is not the one that was built, or it samples with other settings than greedy ones"


def misfed(ids: Sequence[int], expected: RightAnswers) -> dict[str, list[int]]:
    """Return prompts that a server may have taken for another one, by what went wrong."""
    bos = expected.tokenizer.bos_token_id
    found: dict[str, list[int]] = {}
    if bos is not None:
        found["the BOS token is doubled"] = [bos, *ids]
        if ids[0] == bos and len(ids) > 1:
            found["the BOS token is missing"] = list(ids[1:])
    return found


def text_cause(wrong: Sequence[tuple[Item, list[int], str, str]], expected: RightAnswers) -> str:
    """Explain wrong texts of token ids."""
    if all(given == expected.text(item, ids, skip=False) for item, ids, _, given in wrong):
        return "special tokens are not skipped"
    if all("".join(given.split()) == "".join(right.split()) for _, _, right, given in wrong):
        return "spaces are lost or added when token ids become text"
    _, ids, right, given = wrong[0]
    whole = expected.tokenizer.decode(ids, skip_special_tokens=False)
    if given in (whole, whole.lstrip()):
        return "special tokens are not skipped"
    return f"the tokenizer is another one, or of another revision: {given[:30]!r} instead of {right[:30]!r}"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A text that was answered wrongly.

    Attributes:
        item: what was asked.
        answer: token ids of the right answer.
        right: its text.
        reply: what was answered.
    """

    item: Item
    answer: Sequence[int]
    right: str
    reply: Reply

    @property
    def extra(self) -> int | None:
        """Tokens of the prompt that the server counted too many; None if it does not count."""
        given = self.reply.prompt_tokens
        return None if given is None else given - len(self.item.ids)


def written_cause(wrong: Sequence[Wrong], expected: RightAnswers, again: Callable[[Item], Reply]) -> tuple[str, str]:
    """Return (what is wrong, its probable cause) of answers to texts."""
    if all(each.item.messages is not None for each in wrong):
        extra = {each.extra for each in wrong}
        if extra == {1}:
            return "chat template", "messages become a prompt of one token too many: the chat template doubles BOS"
        return "chat template", "messages become another prompt: the chat template is not the model's own"
    if cause := _prompt_cause(wrong):
        return "prompt tokens", cause
    if any(again(each.item).text != each.reply.text for each in wrong):
        cause = "the same prompt is answered differently each time: it samples, although temperature 0 was asked for"
        return "sampling", cause
    full = [each for each in wrong if not expected.ended_early(each.answer)]
    sizes = {(each.reply.answer_tokens or 0) - len(each.answer) for each in full}
    if len(sizes) == 1 and abs(off := sizes.pop()) in (1, 2):
        return "max_tokens", f"answers have {abs(off)} token{'s' * (abs(off) > 1)} too {'many' if off > 0 else 'few'}"
    return "text", _texts_cause(wrong, expected)


def _prompt_cause(wrong: Sequence[Wrong]) -> str:
    """Explain answers by the number of tokens that the server read; empty if that is right."""
    extra = [each.extra for each in wrong if each.extra is not None]
    if not any(extra):
        return ""
    if all(each == 1 for each in extra):
        return "the BOS token is doubled"
    if all(each == -1 for each in extra):
        return "the BOS token is missing"
    if all(each < 0 for each in extra):
        return f"prompts are truncated to {wrong[0].reply.prompt_tokens} tokens"
    return "prompts have another number of tokens: the tokenizer is another one"


def _texts_cause(wrong: Sequence[Wrong], expected: RightAnswers) -> str:
    """Explain answers by their texts."""
    pairs = [(each.reply.text, each.right) for each in wrong]
    specials = [getattr(expected.tokenizer, name) for name in ("eos_token", "pad_token", "bos_token")]
    hypotheses: dict[str, Callable[[str, str], bool]] = {
        "spaces are lost or added": lambda given, right: (
            given.split() == right.split() or "".join(given.split()) == "".join(right.split())
        ),
        "the prompt is repeated in front of the answer": lambda given, right: given.endswith(right),
        "answers end early": lambda given, right: right.startswith(given),
        "special tokens are not skipped": lambda given, _: any(each and each in given for each in specials),
        "answers go on after the token that ends them: another end id is used": lambda given, right: given.startswith(
            right
        ),
    }
    for cause, holds in hypotheses.items():
        if all(holds(given, right) for given, right in pairs):
            return cause
    first = wrong[0]
    for cause, fed in misfed(first.item.ids, expected).items():
        if expected.text(first.item, expected.source.answers([fed])[0]) == first.reply.text:
            return cause
    return f"answers differ: {first.reply.text[:30]!r} instead of {first.right[:30]!r}"
