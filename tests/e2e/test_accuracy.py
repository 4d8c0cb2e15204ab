"""What the bundled models show: compression methods differ, and by how much is on the screen."""

import json

import pytest

MODELS = ("tiny_gemma", "tiny_llama")
pytestmark = pytest.mark.timeout(2000)  # the sweeps below take minutes, longer on a busy machine


@pytest.fixture(scope="module")
def rows(cli):
    """One sweep of both models over everything compared below: (model, variant) -> row of the table."""
    models = f"model={','.join(MODELS)}"
    cli.run("sweep", models, "quant=none,int4_wo,int4_awq", timeout=900)
    cli.run("sweep", models, "quant=none", "sparsity=magnitude_2_4,sparsegpt_2_4", timeout=900)
    tables = [json.loads(path.read_text()) for path in (cli.folder / "runs" / "sweeps").glob("*/accuracy.json")]
    return {(row["model"], row["format"]): row for table in tables for row in table}


@pytest.mark.parametrize("model", MODELS)
def test_the_baseline_knows_its_world(rows, model):
    row = rows[model, "none"]
    assert row["questions"] >= 1000
    assert row["baseline_accuracy"] >= 0.85


@pytest.mark.parametrize("model", MODELS)
def test_int4_weight_only_is_visibly_worse_than_awq(rows, model):
    plain, awq = rows[model, "int4_wo"], rows[model, "int4_awq"]
    assert awq["accuracy"] - plain["accuracy"] > 3 * plain["accuracy_stderr"]
    assert (plain["verdict"], awq["verdict"]) == ("NO-GO", "GO")


@pytest.mark.parametrize("model", MODELS)
def test_magnitude_pruning_is_visibly_worse_than_sparsegpt(rows, model):
    magnitude, sparsegpt = rows[model, "magnitude_2_4"], rows[model, "sparsegpt_2_4"]
    assert sparsegpt["accuracy"] - magnitude["accuracy"] > 3 * magnitude["accuracy_stderr"]


def test_sparse_and_fp8_together(cli):
    """The README's combination; the zeros survive quantization."""
    import numpy as np

    from pipelines.checkpoint.read import Checkpoint

    cli.run("build", "quant=fp8", "sparsity=sparsegpt_2_4")
    (folder,) = (cli.store / "quantize").glob("tiny_gemma-sparsegpt_2_4-fp8-*")
    checkpoint = Checkpoint.open(folder)
    weight_oi = np.asarray(checkpoint.tensor("transformer.layers.0.mlp.fc.weight")).astype(np.float32)
    groups = (weight_oi.reshape(weight_oi.shape[0], -1, 4) == 0).sum(axis=2)
    assert groups.min() >= 2
