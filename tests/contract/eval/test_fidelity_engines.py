"""Fidelity of real engines: planted damage comes out in order, noise stays below it, and NaN has a place."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eval.adapter import EngineLM, load_tokenizer
from eval.answer_cache import AnswerLog, CachedSession
from eval.fidelity.divergence import Figures
from eval.fidelity.measure import Side, Windows, check_sides, greedy, layer_errors, measure
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.engines.port import BuildLimits, NotFiniteError, SamplingParams
from pipelines.settings.model import BUNDLED
from tests.support.random_checkpoint import write_checkpoint
from tests.support.scheduled import Channel, answers, asked, scheduler
from tests.support.scored_logits import scored_logits

SHAPE = ModelShape(
    architecture="LlamaForCausalLM", num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=128, vocab_size=320, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
LIMITS = BuildLimits(max_batch_size=4, max_input_len=128, max_seq_len=256, max_num_tokens=256)
TEXT = Windows("user", tuple(map(tuple, np.random.default_rng(5).integers(0, 320, (4, 65)).tolist())), unseen=True)
FC = "transformer.layers.0.mlp.fc.weight"
Array = np.ndarray[Any, Any]


def rounded(bits: int) -> Callable[[Array], Array]:
    """Round to 2^bits levels, symmetric around 0."""

    def change(weight: Array) -> Array:
        step = np.abs(weight).max() / (2 ** (bits - 1) - 1)
        return np.round(weight / step) * step

    return change


def scaled(percent: float) -> Callable[[Array], Array]:
    return lambda weight: weight * (1 + percent / 100)


def with_nan(weight: Array, rows: Any) -> Array:
    weight = weight.copy()
    weight[rows] = np.nan
    return weight


def without_rows(share: int) -> Callable[[Array], Array]:
    """Lose one of `share` output channels, evenly spread."""
    return lambda weight: np.where(np.arange(len(weight))[:, None] % share == 0, 0, weight)


DAMAGE = {
    "rounded to n bits": (FC, {8: rounded(8), 6: rounded(6), 5: rounded(5), 4: rounded(4), 3: rounded(3)}),
    "scale off by n %": ("transformer.layers.1.attention.dense.weight", {n: scaled(n) for n in (1, 5, 20, 60)}),
    "one of n channels lost": ("transformer.layers.2.mlp.proj.weight", {n: without_rows(n) for n in (64, 16, 4)}),
}


class Engines:
    """Engines of one random model, each with one tensor changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        folder = write_checkpoint(root / "plain", SHAPE, QFormat.NONE)
        tensors = load_file(folder / "rank0.safetensors")
        for name, values in tensors.items():  # far from uniform predictions
            if values.ndim == 2 and "embedding" not in name:
                tensors[name] = (values.astype(np.float32) * 6).astype(values.dtype)
            elif values.ndim == 1:
                tensors[name] = np.ones_like(values)
        save_file(tensors, folder / "rank0.safetensors")
        self._checkpoint, self._tensors = folder, tensors

    def side(self, name: str, tensor: str = "", change: Callable[[Array], Array] | None = None) -> Side:
        """Build and open an engine; without a change, of the model as it is."""
        folder, engine = self.root / f"checkpoint-{name}", self.root / f"engine-{name}"
        if not engine.exists():
            folder.mkdir()
            shutil.copy(self._checkpoint / "config.json", folder)
            tensors = dict(self._tensors)
            if change is not None:
                values = tensors[tensor]
                tensors[tensor] = change(values.astype(np.float32)).astype(values.dtype)
            save_file(tensors, folder / "rank0.safetensors")
            OpenVinoEngine().build(folder, LIMITS, engine, SilentProgress())
        options = OpenVinoOptions(inference_precision="f32", num_threads=1)
        return Side(name, OpenVinoEngine(options).open(engine))

    @cache  # noqa: B019 - lives as long as the module's tests
    def plain(self) -> Side:
        """Return the model as it is."""
        return self.side("none")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"))


def figures(engines: Engines, other: Side) -> tuple[Figures, Figures]:
    names = {"model": "tiny_gemma", "qformat": other.name, "engine": "openvino", "reference": "tiny_gemma"}
    progress = SilentProgress()
    result = measure(engines.plain(), other, [TEXT], engines.root, progress, **names, greedy=None, layers=None)
    return result.overall, result.noise


@pytest.mark.thorough
def test_twelve_planted_damages_come_out_in_order(engines: Engines) -> None:
    """Within each kind a larger damage has a larger divergence, in the mean and at the 99th percentile."""
    for kind, (tensor, grades) in DAMAGE.items():
        found = [
            figures(engines, engines.side(f"{kind[:5]}-{grade}".replace(" ", "_"), tensor, change))[0]
            for grade, change in grades.items()
        ]
        for name in ("kl_mean", "kl_p99"):
            values = [getattr(each, name) for each in found]
            assert values == sorted(values), (kind, name, values)
            assert len(set(values)) == len(values)
        agreement = [each.top1_agreement for each in found]
        assert agreement[0] > agreement[-1], (kind, agreement)
    assert sum(len(grades) for _, grades in DAMAGE.values()) == 12


def test_the_same_engine_again_is_within_the_noise(engines: Engines) -> None:
    again = engines.side("again")
    found, noise = figures(engines, again)
    assert 0 < noise.kl_mean < 1e-3
    assert found.kl_max < noise.kl_mean / 100
    assert "kl_mean" in found.within(noise)
    damaged, _ = figures(engines, engines.side("rounde-5", FC, rounded(5)))
    assert "kl_mean" not in damaged.within(noise)


def test_what_is_kept_meanwhile_lies_on_the_disk_that_is_named_when_it_is_full(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of the stage, not where the system keeps temporary files; nothing of it stays."""
    monkeypatch.setattr("tempfile.tempdir", str(engines.root / "no such folder"))
    engines.plain()
    before = sorted(engines.root.iterdir())
    figures(engines, engines.plain())
    assert sorted(engines.root.iterdir()) == before


@pytest.mark.thorough
def test_slices_of_any_size_give_the_same_figures(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are consumed in slices: of a whole batch of windows, or of a few tokens of one window."""
    other = engines.side("rounde-4", FC, rounded(4))
    whole, _ = figures(engines, other)
    monkeypatch.setattr("eval.fidelity.measure.MAX_LOGITS", 10 * SHAPE.vocab_size)
    pieces, _ = figures(engines, other)
    assert pieces.tokens == whole.tokens == 4 * 64
    assert pieces.kl_mean == pytest.approx(whole.kl_mean, rel=1e-4)
    assert pieces.perplexity == pytest.approx(whole.perplexity, rel=1e-5)


def test_logits_are_those_of_the_serving_engine(engines: Engines) -> None:
    """Teacher forcing reads what scoring reads."""
    side = engines.plain()
    row = list(TEXT.rows[0][:-1])
    forcing = side.session.teacher_forcing()
    (hidden,) = (piece.copy() for piece in forcing.hidden([row], len(row)))
    (found,) = forcing.logits([hidden], len(row))
    np.testing.assert_allclose(found[0], scored_logits(side.session, row), rtol=1e-4, atol=1e-4)
    pieces = [logits.copy() for logits in side.session.head().logits([hidden], 7)]
    assert [piece.shape[1] for piece in pieces] == [7] * 9 + [1]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1)[0], found[0], rtol=1e-5, atol=1e-5)


def test_layers_show_the_damaged_tensor_and_all_blocks_after_it(engines: Engines) -> None:
    other = engines.side("layer", "transformer.layers.1.mlp.gate.weight", rounded(3))
    found = layer_errors(engines.plain(), other, [TEXT], scaled=False, progress=SilentProgress())
    assert found.blocks[0] < 1e-5 < min(found.noise)
    assert min(found.blocks[1:]) > 2 * max(found.noise)
    wrong = {name: errors for name, errors in found.weights.items() if max(errors) > 0}
    assert list(wrong) == ["mlp.up_proj"]
    assert wrong["mlp.up_proj"][0] == wrong["mlp.up_proj"][2] == 0
    weight = engines._tensors["transformer.layers.1.mlp.gate.weight"].astype(np.float32)
    by_hand = np.linalg.norm(rounded(3)(weight) - weight) / np.linalg.norm(weight)
    assert wrong["mlp.up_proj"][1] == pytest.approx(by_hand, rel=0.01)  # the checkpoint keeps bf16


@pytest.mark.thorough
def test_a_factor_per_input_channel_is_no_error_where_formats_move_it(engines: Engines) -> None:
    factors = np.linspace(0.5, 2, SHAPE.hidden_size).astype(np.float32)
    other = engines.side("smooth", FC, lambda weight: weight * factors)
    errors = {
        scaled: layer_errors(engines.plain(), other, [TEXT], scaled=scaled, progress=SilentProgress()).weights
        for scaled in (False, True)
    }
    assert errors[False]["mlp.gate_proj"][0] > 0.3
    assert errors[True]["mlp.gate_proj"][0] < 0.01


def test_nan_is_refused_with_the_block_it_comes_from(engines: Engines) -> None:
    other = engines.side("nan", "transformer.layers.1.post_layernorm.weight", lambda weight: weight * np.nan)
    message = (
        r"^nan gives logits that are NaN or infinite: the output of decoder block 1 is the first that is not finite"
    )
    with pytest.raises(UserError, match=message):
        figures(engines, other)
    head = engines.side("head", "transformer.ln_f.weight", lambda weight: weight * np.nan)
    with pytest.raises(UserError, match=r"all decoder blocks give finite outputs, so it is the last norm or the head"):
        figures(engines, head)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_evaluation_names_the_block_too(engines: Engines, tmp_path: Path, *, keeps: bool) -> None:
    """Whether the engine is asked directly or its answers are kept."""
    side = engines.side("nan", "transformer.layers.1.post_layernorm.weight", lambda weight: weight * np.nan)
    session = CachedSession(lambda: side.session, AnswerLog(tmp_path / "answers.jsonl")) if keeps else side.session
    asked = EngineLM(session, load_tokenizer(BUNDLED / "models" / "tiny_llama"), 64, SilentProgress())
    with pytest.raises(UserError, match=r"^The engine gives logits that are NaN .*decoder block 1 is the first"):
        asked._loglikelihood_tokens([(("q", "a"), [5, 6, 7], [8])])


BLOCK = ("transformer.layers.1.post_layernorm.weight", slice(None), [0, 0], "decoder block 1 is the first")


@pytest.mark.parametrize(
    ("tensor", "rows", "after", "where", "limits"),
    [
        (*BLOCK, SamplingParams(6)),
        pytest.param(*BLOCK, SamplingParams(6, temperature=0.7), marks=pytest.mark.thorough),
        pytest.param(*BLOCK, SamplingParams(6, frozenset({0})), marks=pytest.mark.thorough),
        ("transformer.ln_f.weight", slice(None), [0, 0], "it is the last norm or the head", SamplingParams(6)),
        pytest.param(
            "transformer.vocab_embedding.weight",
            7,
            [5, 6, 7],
            "decoder block 0 is the first",
            SamplingParams(6),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_answers_written_from_nan_are_refused_with_the_block_too(
    engines: Engines, tensor: str, rows: Any, after: list[int], where: str, limits: SamplingParams
) -> None:
    """Greedily, sampled, and where token 0, which is taken then, ends an answer at once; when loading, or later."""
    side = engines.side(f"nan {tensor}", tensor, lambda weight: with_nan(weight, rows))
    with pytest.raises(NotFiniteError, match=r"^The engine gives logits that are NaN or infinite") as caught:
        side.session.generate([[5, 6, 7]], limits, SilentProgress())
    assert list(caught.value.tokens)[: len(after)] == after
    model = EngineLM(side.session, load_tokenizer(BUNDLED / "models" / "tiny_llama"), 64, SilentProgress())
    model.tok_encode = lambda _: [5, 6, 7]  # the vocabulary of this model is smaller than the tokenizer's
    with pytest.raises(UserError, match=where):
        model._generate(["a"], {"max_gen_toks": 4, "do_sample": limits.temperature > 0, "until": []}, SilentProgress())


@pytest.mark.parametrize("tensor", ["transformer.layers.1.post_layernorm.weight", "transformer.ln_f.weight"])
def test_a_model_that_returns_nan_is_not_served(engines: Engines, tensor: str) -> None:
    """Its every answer would be token 0, and one client that asks for log probabilities would end the engine."""
    side = engines.side(f"nan {tensor}", tensor, lambda weight: weight * np.nan)
    with (
        pytest.raises(NotFiniteError, match="The engine gives logits that are NaN"),
        scheduler(side.session.folder.path),
    ):
        pass


def test_a_served_model_that_returns_nan_later_says_so(engines: Engines) -> None:
    """Where log probabilities are asked for; genai's own words are of a failed check in its sources."""
    side = engines.side("nan of 7", "transformer.vocab_embedding.weight", lambda weight: with_nan(weight, 7))
    with scheduler(side.session.folder.path) as running:
        assert len(*(each.tokens for each in answers(running, [asked([5, 6], 3, log_probs=True)]))) == 3
        channel = Channel()
        running.submit([asked([5, 6, 7], 3, log_probs=True)], channel)
        assert channel.ended.wait(30)
        assert channel.error.startswith("The engine has failed: The engine gives logits that are NaN")


def test_answers_that_end_in_token_0_are_not_taken_for_nan(engines: Engines) -> None:
    """They are read once more, and the engine goes on."""
    side = engines.side(
        "zero", "lm_head.weight", lambda weight: np.where(np.arange(len(weight))[:, None] == 0, weight * 0 + 9, weight)
    )
    prompts = [[number, 6, 7] for number in range(1, 9)]
    first = side.session.generate(prompts, SamplingParams(6), SilentProgress())
    assert any(each.token_ids[-1] == 0 for each in first)
    assert side.session.generate(prompts, SamplingParams(6), SilentProgress()) == first


def test_greedy_continuations_name_the_first_token_that_differs(engines: Engines) -> None:
    again, other = engines.side("again"), engines.side("rounde-3", FC, rounded(3))
    asked = {"prompts": 3, "new_tokens": 12, "progress": SilentProgress()}
    same = greedy(engines.plain(), again, [TEXT], **asked)
    assert same.first_difference == (None, None, None)
    found = greedy(engines.plain(), other, [TEXT], **asked)
    assert len(found.first_difference) == 3
    assert found.equal < 3
    assert all(at is None or 0 <= at < 12 for at in found.first_difference)


def test_other_vocabularies_are_refused(engines: Engines) -> None:
    class Smaller:
        vocabulary = 100

    with pytest.raises(UserError, match="small has a vocabulary of 100 tokens and none one of 320"):
        check_sides(engines.plain(), Side("small", Smaller()))  # type: ignore[arg-type]
