"""What is served against the last stage before it: tokenizer, template, sampling and text, one by one.

Of a Triton repository, each model is asked alone with the input that it should get, so that the first wrong one is
named: preprocessing (text to ids), tensorrt_llm (ids to ids), postprocessing (ids to text), and then the ensemble. An
OpenAI-compatible server is asked from outside; its counts of tokens say what it did to a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from eval.diagnose.expected import RightAnswers
from eval.diagnose.items import Item
from eval.diagnose.result import Finding, Place, StageResult, StageVerdict
from eval.diagnose.served_causes import Wrong, answers_cause, ids_cause, text_cause, written_cause
from eval.diagnose.servers import OpenAiService, Servers, TritonModels
from pipelines.domain.progress import Progress

BESIDE = "Compare the repository's tokenizer and parameters with the model's, and write it again: make repository"
SERVER = "Compare the server's settings with these: greedy sampling, the model's own tokenizer and chat template."
STOPS = 2
"""Stop words that are tried on each answer."""
Found = tuple[list[Finding], int]
"""What differs, and how many answers part at a near tie."""


def examine_triton(served: Servers, expected: RightAnswers, progress: Progress) -> StageResult:
    """Ask the models of a Triton server one by one, the first wrong one ends it."""
    assert served.triton is not None
    asked = TritonModels(served.triton, served.text_model)
    steps = [_preprocessing, _engine_model, _postprocessing] if served.whole else []
    return _examined(Place.TRITON, [*steps, _text_model, _stop_word], asked, expected.of_texts(), progress)


def examine_openai(served: Servers, expected: RightAnswers, progress: Progress) -> StageResult:
    """Ask an OpenAI-compatible server from outside."""
    assert served.openai is not None
    asked = OpenAiService(served.openai, served.model)
    return _examined(Place.OPENAI, [_text_model, _stop_word], asked, expected, progress)


def _examined(
    place: Place, steps: Sequence[Any], asked: Any, expected: RightAnswers, progress: Progress
) -> StageResult:
    findings: list[Finding] = []
    ties = 0
    with progress.task(f"asking {place}", len(steps), "steps") as advance:
        for step in steps:
            found, near = step(asked, expected)
            ties += near
            findings += found
            advance(1)
            if findings:
                break
    items = len(expected.items)
    return StageResult(
        place,
        f"{expected.before}: greedy answers, token by token, and what they are made of",
        findings[0].figure if findings else f"0 of {items} differ",
        f"{ties} near ties",
        StageVerdict.ACCUSED if findings else StageVerdict.CLEAN,
        "",
        tuple(findings),
    )


def _preprocessing(asked: TritonModels, expected: RightAnswers) -> Found:
    """Compare the token ids that the repository makes of each text."""
    from pipelines.serving.openai.inputs import InputTensor

    wrong: list[tuple[Item, list[int]]] = []
    for item in expected.items:
        outputs = asked.ask(
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


def _engine_model(asked: TritonModels, expected: RightAnswers) -> Found:
    """Compare what the served engine continues token ids with."""
    answers = [asked.continued(item.ids, expected) for item in expected.items]
    return _answers_differ(answers, expected, "tensorrt_llm output_ids", asked.continued)


def _answers_differ(given: Sequence[Sequence[int]], expected: RightAnswers, tensor: str, again: Any) -> Found:
    wrong, ties = [], 0
    for item, right, answer in zip(expected.items, expected.answers, given, strict=True):
        if list(answer) == right:
            continue
        if expected.within_noise(item, right, answer):
            ties += 1
        else:
            wrong.append((item, right, list(answer)))
    if not wrong:
        return [], ties
    figure = f"{len(wrong)} of {len(expected.items)} answers differ"
    return [Finding(None, tensor, figure, answers_cause(wrong, expected, again), BESIDE)], ties


def _postprocessing(asked: TritonModels, expected: RightAnswers) -> Found:
    """Compare the texts that the repository makes of token ids."""
    wrong = []
    for item, answer in zip(expected.items, expected.answers, strict=True):
        ids = [*answer, *expected.ends[:1]]
        if not answer:
            continue
        given = asked.text_of(ids)
        right = expected.text(item, ids)
        if given != right and not (given == right + "\ufffd" or "\ufffd" in right):
            wrong.append((item, ids, right, given))
    if not wrong:
        return [], 0
    return [
        Finding(None, "postprocessing OUTPUT", f"{len(wrong)} texts differ", text_cause(wrong, expected), BESIDE)
    ], 0


def _text_model(asked: Any, expected: RightAnswers) -> Found:
    """Compare prompts as text with answers as text."""
    wrong, ties = [], 0
    for item, answer in zip(expected.items, expected.answers, strict=True):
        each = Wrong(item, answer, expected.text(item, answer), asked.written(item, expected))
        if each.reply.text == each.right and not each.extra and _same_length(each, expected):
            continue
        if not each.extra and _parts_at_a_tie(each, expected):
            ties += 1
        else:
            wrong.append(each)
    if not wrong:
        return [], ties
    figure = f"{len(wrong)} of {len(expected.items)} answers differ"
    what, cause = written_cause(wrong, expected, lambda item: asked.written(item, expected))
    return [Finding(None, f"{asked.text_model} {what}", figure, cause, SERVER)], ties


def _same_length(each: Wrong, expected: RightAnswers) -> bool:
    """Return whether the server counts the tokens of the right answer, perhaps with the one that ends it."""
    count = each.reply.answer_tokens
    return count in (None, len(each.answer), len(each.answer) + expected.ended_early(each.answer))


def _parts_at_a_tie(each: Wrong, expected: RightAnswers) -> bool:
    """Return whether an answer's text leaves the right one where two tokens are nearly equally likely."""
    text, item, answer = each.reply.text, each.item, each.answer
    for at in range(len(answer)):
        before, after = (expected.text(item, answer[:n]) for n in (at, at + 1))
        if text.startswith(before) and not text.startswith(after):
            return len(text) > len(before) and expected.source.nearly_equal([*item.ids, *answer[:at]])
    return False


def _stop_word(asked: Any, expected: RightAnswers) -> Found:
    """Compare where stop words end answers."""
    for item, answer in zip(expected.items, expected.answers, strict=True):
        text = expected.text(item, answer)
        stops = _stop_words(text, answer, expected.tokenizer) if item.messages is None else []
        if not stops or asked.written(item, expected).text != text:  # at a near tie the words may not come
            continue
        for stop in stops:
            right, given = text[: text.index(stop)], asked.written(item, expected, stop=stop).text
            if given in (right, right + stop):  # Triton's models keep the stop word
                continue
            early = (right + stop).startswith(given)
            cause = "end answers too early" if early else "do not end answers where they should"
            said = f"stop words {cause}: {stop!r} gives {given[-20:]!r} instead of {right[-20:]!r}"
            return [Finding(None, f"{asked.text_model} stop words", f"{stop!r} differs", said, SERVER)], 0
    return [], 0


def _stop_words(text: str, answer: Sequence[int], tokenizer: Any) -> list[str]:
    """Return words of an answer to stop at: of several tokens, the first of which comes alone before, if there are."""
    words = text.split(" ")
    pairs = [f" {a} {b}" for a, b in itertools.pairwise(words[2:]) if a and b]
    found = [each for each in pairs if text.count(each) == 1]
    first = {each: tokenizer(each, add_special_tokens=False)["input_ids"][0] for each in found}
    telling = [each for each in found if list(answer).count(first[each]) > 1 and text.index(each) > len(text) // 3]
    return [*telling, *found][:STOPS]
