"""Perplexity of texts: lm-eval's own model gives the same figures, and nothing makes a verdict of them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eval.harness import LM_EVAL, EvalSpec, evaluate
from eval.perplexity import PerplexityResult, perplexity_rows, perplexity_table
from pipelines.document.blocks import render_text
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress

ARTICLES = (
    " \n = River = \n \n What is the river of the stone ? The 1 @,@ 200 violins , the tiger 's cloud . \n",
    " \n = Harbor = \n \n " + "The lantern of the meadow is the falcon of the harbor . " * 12,
)


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EleutherAI/wikitext_document_level: wikitext-2-raw-v1/<split>-00000-of-00001.parquet with the column `page`."""
    root = tmp_path_factory.mktemp("wikitext")
    (root / "wikitext-2-raw-v1").mkdir()
    for split in ("train", "validation", "test"):
        rows = pyarrow.Table.from_pylist([{"page": page} for page in ARTICLES])
        pyarrow.parquet.write_table(rows, root / "wikitext-2-raw-v1" / f"{split}-00000-of-00001.parquet")
    return root


def read(session: Any, folder: Path, root: Path, **settings: Any) -> Any:
    spec = EvalSpec(task="wikitext", **{"max_length": 64, "num_fewshot": None, "dataset_path": root, **settings})
    return evaluate(session, folder, spec, SilentProgress(), model="m", qformat="none", engine="torch")


def test_figures_are_those_of_lm_evals_own_model(checkpoint: Any, torch_session: Any, wikitext: Path) -> None:
    """With and without BOS in the tokenizer; the second article takes several windows of 64 tokens."""
    from lm_eval.evaluator import evaluate as stock_evaluate
    from lm_eval.models.huggingface import HFLM

    from eval.tasks.load import load_tasks

    model, tokenizer, folder = checkpoint
    spec = EvalSpec(task="wikitext", max_length=64, num_fewshot=None, dataset_path=wikitext)
    hf = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=64)
    theirs = stock_evaluate(lm=hf, task_dict=load_tasks(spec), bootstrap_iters=0)["results"]["wikitext"]
    ours = read(torch_session(model), folder, wikitext)
    assert isinstance(ours, PerplexityResult)
    assert ours.documents == 2
    assert ours.word_perplexity == pytest.approx(theirs["word_perplexity,none"], rel=1e-5)
    assert ours.byte_perplexity == pytest.approx(theirs["byte_perplexity,none"], rel=1e-5)
    assert ours.bits_per_byte == pytest.approx(theirs["bits_per_byte,none"], rel=1e-5)
    assert ours.bits_per_byte == pytest.approx(math.log2(ours.byte_perplexity))


def test_it_is_kept_as_json_and_in_lm_evals_form(
    checkpoint: Any, torch_session: Any, wikitext: Path, tmp_path: Path
) -> None:
    model, _, folder = checkpoint
    spec = EvalSpec(task="wikitext", max_length=64, num_fewshot=None, dataset_path=wikitext, limit=1)
    found = evaluate(
        torch_session(model), folder, spec, SilentProgress(), model="m", qformat="fp8", engine="torch",
        export_to=tmp_path,
    )  # fmt: skip
    assert found.documents == 1
    found.save(tmp_path / "perplexity.json")
    assert PerplexityResult.load(tmp_path / "perplexity.json") == found
    exported = json.loads((tmp_path / LM_EVAL).read_text())
    assert exported["results"]["wikitext"]["word_perplexity,none"] == found.word_perplexity


@pytest.mark.parametrize(
    ("settings", "named"), [({"num_fewshot": 1}, "num_fewshot=1"), ({"metric": "acc"}, "metric=acc")]
)
def test_settings_without_an_effect_are_refused(
    checkpoint: Any, torch_session: Any, wikitext: Path, settings: Any, named: str
) -> None:
    model, _, folder = checkpoint
    with pytest.raises(UserError, match=f"{named} has no effect"):
        read(torch_session(model), folder, wikitext, **settings)


RESULT = PerplexityResult("m", "fp8", "openvino", "wikitext", None, 512, "0.4.13", "ab", 62, 20.0, 1.75, 0.8)


def test_the_ratio_is_shown_without_a_verdict() -> None:
    base = replace(RESULT, qformat="none", word_perplexity=16.0)
    (row,) = perplexity_rows([(base, RESULT)])
    assert (row["ratio"], row["verdict"]) == (1.25, None)
    text = render_text([perplexity_table([("m fp8", base, RESULT)])])
    assert ["m", "fp8", "wikitext", "62", "16", "20", "1.2500", "1.7500", "0.8000"] in [
        line.split() for line in text.splitlines()
    ]
    assert "It has no verdict" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 79


@pytest.mark.parametrize("change", [{"max_length": 256}, {"limit": 3}, {"prompts_sha256": "cd"}, {"task": "c4"}])
def test_other_texts_or_windows_have_no_ratio(change: Any) -> None:
    with pytest.raises(UserError, match="did not read the same texts"):
        perplexity_rows([(replace(RESULT, **change), RESULT)])


@pytest.mark.parametrize("data", [{}, [], {"model": "m"}, None])
def test_another_file_is_not_read_as_a_result(data: Any) -> None:
    with pytest.raises(UserError, match="here is not a result of perplexity"):
        PerplexityResult.from_json(data, "here")
