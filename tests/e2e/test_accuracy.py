"""What the bundled models show: compression methods differ, and by how much is on the screen."""

import json
import re

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2000)]  # the sweeps take minutes, longer on a busy machine


def swept(cli, *words):
    """One sweep: variant -> row of the table."""
    cli.run("sweep", *words, timeout=900)
    folder = max((cli.folder / "runs" / "sweeps").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return {row["format"]: row for row in json.loads((folder / "accuracy.json").read_text())}


@pytest.fixture(scope="module")
def quantized(cli):
    return swept(cli, "model=tiny_gemma", "quant=none,int4_wo,int4_awq")


@pytest.fixture(scope="module")
def sparse(cli):
    return swept(cli, "model=tiny_llama", "quant=none", "sparsity=magnitude_2_4,sparsegpt_2_4")


def test_the_baselines_know_their_world(quantized, sparse):
    for row in (quantized["none"], sparse["sparsegpt_2_4"]):
        assert row["questions"] >= 1000
        assert row["baseline_accuracy"] >= 0.85


def test_int4_weight_only_is_visibly_worse_than_awq(quantized):
    plain, awq = quantized["int4_wo"], quantized["int4_awq"]
    assert awq["accuracy"] - plain["accuracy"] > 3 * plain["accuracy_stderr"]
    assert (plain["verdict"], awq["verdict"]) == ("NO-GO", "GO")


def test_magnitude_pruning_is_visibly_worse_than_sparsegpt(sparse):
    magnitude, sparsegpt = sparse["magnitude_2_4"], sparse["sparsegpt_2_4"]
    assert sparsegpt["accuracy"] - magnitude["accuracy"] > 3 * magnitude["accuracy_stderr"]


def test_sparse_and_fp8_together(cli, sparse):
    """The README's combination, from weights that the sweep has made sparse; the zeros survive quantization."""
    import numpy as np

    from pipelines.checkpoint.read import Checkpoint

    said = cli.run("build", "model=tiny_llama", "quant=fp8", "sparsity=sparsegpt_2_4")
    assert re.search(r"sparsify +cached", said)
    (folder,) = (cli.store / "quantize").glob("tiny_llama-sparsegpt_2_4-fp8-*")
    checkpoint = Checkpoint(folder)
    weight_oi = np.asarray(checkpoint.tensor("transformer.layers.0.mlp.fc.weight")).astype(np.float32)
    groups = (weight_oi.reshape(weight_oi.shape[0], -1, 4) == 0).sum(axis=2)
    assert groups.min() >= 2
