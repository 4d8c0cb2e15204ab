"""The reference for everything converted: a model as Transformers computes it, in float32."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pipelines.compress.loading import ReferenceModel  # noqa: E402
from pipelines.domain.errors import UserError  # noqa: E402
from pipelines.domain.progress import SilentProgress  # noqa: E402

PAIRS = [
    ((1, 2, 3), (4,)),
    ((1, 2, 3), (9,)),  # the same sequence is fed for both
    ((7, 8), (5, 6)),  # and as long as those, but another one
    ((1, 2), (3, 4)),  # the first sequence again, of which two tokens are scored
    ((11, 12, 13, 14, 15), (16,)),
]


def by_hand(folder: Path, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    """One forward pass of one sequence, with all of its logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :]
    logprobs = torch.log_softmax(logits, dim=-1)
    total = sum(float(logprobs[i, token]) for i, token in enumerate(continuation))
    return total, logprobs.argmax(-1).tolist() == list(continuation)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_scores_are_those_of_transformers(kind: str, models: dict[str, Path]) -> None:
    found = ReferenceModel(models[kind], "cpu").loglikelihood(PAIRS, SilentProgress())
    wanted = [by_hand(models[kind], *pair) for pair in PAIRS]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


def test_the_likeliest_continuation_is_known_as_such(models: dict[str, Path]) -> None:
    model = ReferenceModel(models["llama"], "cpu")
    scores = model.loglikelihood([((1, 2, 3), (token,)) for token in range(200)], SilentProgress())
    best = max(range(200), key=lambda token: scores[token][0])
    assert [token for token in range(200) if scores[token][1]] == [best]


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no config.json"):
        ReferenceModel(tmp_path, "cpu")
