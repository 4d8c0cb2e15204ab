"""Compare served models with the stage before them: tokenizer, template, sampling and text, one by one.

Of a Triton repository, each model is asked alone with the input that it should get, so that the first wrong one is
named: preprocessing (text to ids), tensorrt_llm (ids to ids), postprocessing (ids to text), and then the ensemble. An
OpenAI-compatible server is asked from outside; its counts of tokens say what it did to a prompt.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.diagnose.result import Finding, Place, StageResult
from eval.diagnose.servers import Item, OpenAiService, Reply, RightAnswers, Servers, TritonModels
from pipelines.domain.progress import Progress
from pipelines.serving.openai.inputs import InputTensor

# Why served answers differ: hypotheses about token ids, answers and texts; the first that fits is the cause.


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
    if all(len(actual) < len(each.ids) for each, actual in wrong):
        if all(actual == list(each.ids[: len(actual)]) for each, actual in wrong):
            return f"prompts are truncated to {len(ids)} tokens, the end is lost"
        if all(actual[1:] == list(each.ids[len(each.ids) - len(actual) + 1 :]) for each, actual in wrong):
            return f"prompts are truncated to {len(ids)} tokens, the beginning is lost"
    at = next(
        (n for n, pair in enumerate(zip(ids, right, strict=False)) if pair[0] != pair[1]), min(len(ids), len(right))
    )
    tokens = [repr(tokenizer.decode(each[at : at + 1])) if at < len(each) else "nothing" for each in (ids, right)]
    return (
        f"the tokenizer is another one, or of another revision: token {at} of the {item.name} is {tokens[0]}, not "
        f"{tokens[1]}"
    )


def answers_cause(wrong: Sequence[tuple[Item, list[int], list[int]]], expected: RightAnswers, again: Any) -> str:
    """Explain wrong token ids of answers."""
    item, right, answer = wrong[0]
    if any(again(each.ids, expected) != actual for each, _, actual in wrong):
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
    if bos is None:
        return {}
    missing = {"the BOS token is missing": list(ids[1:])} if ids[0] == bos and len(ids) > 1 else {}
    return {"the BOS token is doubled": [bos, *ids], **missing}


def text_cause(wrong: Sequence[tuple[Item, list[int], str, str]], expected: RightAnswers) -> str:
    """Explain wrong texts of token ids."""
    if all(actual == expected.text(item, ids, skip=False) for item, ids, _, actual in wrong):
        return "special tokens are not skipped"
    if all("".join(actual.split()) == "".join(right.split()) for _, _, right, actual in wrong):
        return "spaces are lost or added when token ids become text"
    _, ids, right, actual = wrong[0]
    whole = expected.tokenizer.decode(ids, skip_special_tokens=False)
    if actual in (whole, whole.lstrip()):
        return "special tokens are not skipped"
    return f"the tokenizer is another one, or of another revision: {actual[:30]!r} instead of {right[:30]!r}"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A text that was answered wrongly."""

    item: Item
    answer: Sequence[int]
    right: str
    reply: Reply

    @property
    def extra(self) -> int | None:
        """Tokens of the prompt that the server counted too many; None if it does not count."""
        actual = self.reply.prompt_tokens
        return None if actual is None else actual - len(self.item.ids)


def written_cause(wrong: Sequence[Wrong], expected: RightAnswers, again: Callable[[Item], Reply]) -> tuple[str, str]:
    """Return (what is wrong, its probable cause) of answers to texts."""
    if all(each.item.messages is not None for each in wrong):
        if all(each.extra == 1 for each in wrong):
            return "chat template", "messages become a prompt of one token too many: the chat template doubles BOS"
        return "chat template", "messages become another prompt: the chat template is not the model's own"
    extra = [each.extra for each in wrong if each.extra is not None]
    if any(extra):  # the server read another number of tokens
        if all(each == 1 for each in extra):
            return "prompt tokens", "the BOS token is doubled"
        if all(each == -1 for each in extra):
            return "prompt tokens", "the BOS token is missing"
        if all(each < 0 for each in extra):
            return "prompt tokens", f"prompts are truncated to {wrong[0].reply.prompt_tokens} tokens"
        return "prompt tokens", "prompts have another number of tokens: the tokenizer is another one"
    if any(again(each.item).text != each.reply.text for each in wrong):
        cause = "the same prompt is answered differently each time: it samples, although temperature 0 was asked for"
        return "sampling", cause
    full = [each for each in wrong if not expected.ended_early(each.answer)]
    sizes = {(each.reply.answer_tokens or 0) - len(each.answer) for each in full}
    if len(sizes) == 1 and abs(off := sizes.pop()) in (1, 2):
        return "max_tokens", f"answers have {abs(off)} token{'s' * (abs(off) > 1)} too {'many' if off > 0 else 'few'}"
    return "text", _texts_cause(wrong, expected)


def _texts_cause(wrong: Sequence[Wrong], expected: RightAnswers) -> str:
    pairs = [(each.reply.text, each.right) for each in wrong]
    specials = [getattr(expected.tokenizer, name) for name in ("eos_token", "pad_token", "bos_token")]
    hypotheses: dict[str, Callable[[str, str], bool]] = {
        "spaces are lost or added": lambda actual, right: (
            actual.split() == right.split() or "".join(actual.split()) == "".join(right.split())
        ),
        "the prompt is repeated in front of the answer": lambda actual, right: actual.endswith(right),
        "answers end early": lambda actual, right: right.startswith(actual),
        "special tokens are not skipped": lambda actual, _: any(each and each in actual for each in specials),
        "answers go on after the token that ends them: another end id is used": lambda actual, right: actual.startswith(
            right
        ),
    }
    for cause, holds in hypotheses.items():
        if all(holds(actual, right) for actual, right in pairs):
            return cause
    first = wrong[0]
    for cause, fed in misfed(first.item.ids, expected).items():
        if expected.text(first.item, expected.source.answers([fed])[0]) == first.reply.text:
            return cause
    return f"answers differ: {first.reply.text[:30]!r} instead of {first.right[:30]!r}"


BESIDE = "Compare the repository's tokenizer and parameters with the model's, and write it again: make repository"
SERVER = "Compare the server's settings with these: greedy sampling, the model's own tokenizer and chat template."
STOPS = 2
"""Stop words that are tried on each answer."""
Found = tuple[list[Finding], int]
"""What differs, and how many answers part at a near tie."""


def examine_triton(served: Servers, expected: RightAnswers, progress: Progress) -> StageResult:
    """Ask the models of a Triton server one by one; the first wrong one ends it."""
    assert served.triton is not None
    client = TritonModels(served.triton, served.text_model)
    steps = [_preprocessing, _engine_model, _postprocessing] if served.whole else []
    return _examined(Place.TRITON, [*steps, _text_model, _stop_word], client, expected.of_texts(), progress)


def examine_openai(served: Servers, expected: RightAnswers, progress: Progress) -> StageResult:
    """Ask an OpenAI-compatible server from outside."""
    assert served.openai is not None
    client = OpenAiService(served.openai, served.model)
    return _examined(Place.OPENAI, [_text_model, _stop_word], client, expected, progress)


def _examined(
    place: Place, steps: Sequence[Any], client: Any, expected: RightAnswers, progress: Progress
) -> StageResult:
    findings: list[Finding] = []
    ties = 0
    with progress.task(f"asking {place}", len(steps), "steps") as advance:
        for step in steps:
            cause, near = step(client, expected)
            ties += near
            findings += cause
            advance(1)
            if findings:
                break
    against = f"{expected.before}: greedy answers, token by token, and what they are made of"
    return StageResult.judged(place, against, findings, f"0 of {len(expected.items)} differ", f"{ties} near ties")


def _preprocessing(client: TritonModels, expected: RightAnswers) -> Found:
    wrong: list[tuple[Item, list[int]]] = []
    for item in expected.items:
        outputs = client.ask(
            "preprocessing",
            [InputTensor("QUERY", "BYTES", (item.text,)), InputTensor("REQUEST_OUTPUT_LEN", "INT32", (1,))],
        )
        ids = outputs["INPUT_ID"].reshape(-1).tolist()
        if tuple(ids) != item.ids:
            wrong.append((item, ids))
        end = outputs["OUT_END_ID"].reshape(-1).tolist() if "OUT_END_ID" in outputs else []
        if expected.ends and end and end[0] != expected.ends[0]:
            cause = f"the token that ends answers is {end[0]}, the model's is {expected.ends[0]}"
            return [Finding(None, "preprocessing OUT_END_ID", str(end[0]), cause, BESIDE)], 0
    if not wrong:
        return [], 0
    figure = f"{len(wrong)} of {len(expected.items)} prompts differ"
    return [Finding(None, "preprocessing INPUT_ID", figure, ids_cause(wrong, expected), BESIDE)], 0


def _engine_model(client: TritonModels, expected: RightAnswers) -> Found:
    answers = [client.continued(item.ids, expected) for item in expected.items]
    wrong, ties = [], 0
    for item, right, answer in zip(expected.items, expected.answers, answers, strict=True):
        if answer == right:
            continue
        if expected.within_noise(item, right, answer):
            ties += 1
        else:
            wrong.append((item, right, answer))
    if not wrong:
        return [], ties
    figure = f"{len(wrong)} of {len(expected.items)} answers differ"
    cause = answers_cause(wrong, expected, client.continued)
    return [Finding(None, "tensorrt_llm output_ids", figure, cause, BESIDE)], ties


def _postprocessing(client: TritonModels, expected: RightAnswers) -> Found:
    wrong = []
    for item, answer in zip(expected.items, expected.answers, strict=True):
        ids = [*answer, *expected.ends[:1]]
        if not answer:
            continue
        actual = client.text_of(ids)
        right = expected.text(item, ids)
        if actual != right and not (actual == right + "\ufffd" or "\ufffd" in right):
            wrong.append((item, ids, right, actual))
    if not wrong:
        return [], 0
    return [
        Finding(None, "postprocessing OUTPUT", f"{len(wrong)} texts differ", text_cause(wrong, expected), BESIDE)
    ], 0


def _text_model(client: Any, expected: RightAnswers) -> Found:
    wrong, ties = [], 0
    for item, answer in zip(expected.items, expected.answers, strict=True):
        each = Wrong(item, answer, expected.text(item, answer), client.written(item, expected))
        lengths = (None, len(answer), len(answer) + expected.ended_early(answer))  # perhaps with the token that ends it
        if each.reply.text == each.right and not each.extra and each.reply.answer_tokens in lengths:
            continue
        if not each.extra and _parts_at_a_tie(each, expected):
            ties += 1
        else:
            wrong.append(each)
    if not wrong:
        return [], ties
    figure = f"{len(wrong)} of {len(expected.items)} answers differ"
    what, cause = written_cause(wrong, expected, lambda item: client.written(item, expected))
    return [Finding(None, f"{client.text_model} {what}", figure, cause, SERVER)], ties


def _parts_at_a_tie(each: Wrong, expected: RightAnswers) -> bool:
    """Return whether an answer's text leaves the right one where two tokens are nearly equally likely."""
    text, item, answer = each.reply.text, each.item, each.answer
    for at in range(len(answer)):
        before, after = (expected.text(item, answer[:n]) for n in (at, at + 1))
        if text.startswith(before) and not text.startswith(after):
            return len(text) > len(before) and expected.source.nearly_equal([*item.ids, *answer[:at]])
    return False


def _stop_word(client: Any, expected: RightAnswers) -> Found:
    for item, answer in zip(expected.items, expected.answers, strict=True):
        text = expected.text(item, answer)
        # of several tokens, the first of which comes alone before, if there are such words
        pairs = [f" {a} {b}" for a, b in itertools.pairwise(text.split(" ")[2:]) if a and b]
        unique = [each for each in pairs if text.count(each) == 1 and item.messages is None]
        first = {each: expected.tokenizer(each, add_special_tokens=False)["input_ids"][0] for each in unique}
        telling = [each for each in unique if answer.count(first[each]) > 1 and text.index(each) > len(text) // 3]
        stops = [*telling, *unique][:STOPS]
        if not stops or client.written(item, expected).text != text:  # at a near tie the words may not come
            continue
        for stop in stops:
            right, actual = text[: text.index(stop)], client.written(item, expected, stop=stop).text
            if actual in (right, right + stop):  # Triton's models keep the stop word
                continue
            early = (right + stop).startswith(actual)
            cause = "end answers too early" if early else "do not end answers where they should"
            sentence = f"stop words {cause}: {stop!r} gives {actual[-20:]!r} instead of {right[-20:]!r}"
            return [Finding(None, f"{client.text_model} stop words", f"{stop!r} differs", sentence, SERVER)], 0
    return [], 0
