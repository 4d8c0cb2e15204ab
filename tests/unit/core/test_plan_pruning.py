"""Planning with a pruned model: the order of stages, the sizes that each of them sees, and what is refused."""

from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.variant import Variant
from pipelines.host.machine import GpuFacts
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.unit.core.test_plan_fidelity import MACHINE

WIDTH = ("model=tiny_llama", "prune=width", "prune.mlp=512", "prune.heads=2")
DEPTH = ("model=tiny_llama", "prune=depth", "prune.layers=3")
HERE = "engine=openvino"
ON_GPU = replace(MACHINE, gpus=(GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 81559 * 2**20),), has_tensorrt_llm=True)


def plan(tmp_path, *overrides, target="evaluate", machine=MACHINE):
    settings = load([f"paths.store={tmp_path / 'store'}", *overrides])
    return make_plan(settings, target, Store(settings.paths.store), machine)


def nodes(made):
    return {step.node.id: step.node for step in made.steps}


def test_pruning_comes_first_and_the_baseline_is_the_whole_model(tmp_path):
    found = nodes(plan(tmp_path, HERE, *WIDTH, "sparsity=magnitude_2_4", "quant=int8_wo", "recover=distill"))
    assert [name for name in found if "baseline" not in name] == [
        "prune_model", "sparsify", "recover", "quantize", "build", "evaluate",
    ]  # fmt: skip
    assert found["sparsify"].inputs["model"] == "prune_model"
    assert found["recover"].inputs["model"] == "sparsify"
    original = found["prune_model"].inputs["model"]
    assert found["recover"].inputs["teacher"] == found["baseline.quantize"].inputs["model"] == original
    assert "calibration" in found["prune_model"].inputs
    assert found["quantize"].label == "tiny_llama-mlp_512_heads_2-magnitude_2_4-distill-int8_wo"


def test_recovery_goes_with_pruning_alone(tmp_path):
    found = nodes(plan(tmp_path, HERE, *DEPTH, "quant=none", "recover=distill"))
    assert found["recover"].inputs["model"] == "prune_model"
    assert found["quantize"].label == "tiny_llama-layers_3-distill"


def test_later_stages_see_the_smaller_sizes(tmp_path):
    whole = plan(tmp_path, HERE, "model=tiny_llama", "quant=none")
    made = plan(tmp_path, HERE, *WIDTH, "quant=none")
    pruned = made.deployment.shape
    assert (pruned.intermediate_size, pruned.num_attention_heads, pruned.num_key_value_heads) == (512, 2, 2)
    assert pruned.unpruned == whole.deployment.shape
    note = next(note for note in made.notes if "pruning leaves" in note)
    assert "3,016,960 of 4,065,536 parameters (74.2 %)" in note
    assert next(n for n in made.notes if "full load" in n) != next(n for n in whole.notes if "full load" in n)


def test_the_kv_cache_of_fewer_layers_is_smaller(tmp_path):
    words = ("engine=tensorrt_llm", "quant=fp8")
    both = [plan(tmp_path, *words, *more, target="build", machine=ON_GPU) for more in (DEPTH, ("model=tiny_llama",))]
    pruned, whole = (nodes(made)["build"].stage.predicted for made in both)
    assert 0 < pruned["weights"] < whole["weights"]


def test_the_engine_of_the_baseline_is_predicted_for_the_whole_model(tmp_path):
    words = ("engine=tensorrt_llm", "quant=none", "build.max_num_tokens=8192")  # what is chosen depends on the speed
    found = nodes(plan(tmp_path, *words, *DEPTH, machine=ON_GPU))
    alone = nodes(plan(tmp_path, *words, "model=tiny_llama", machine=ON_GPU))
    assert found["baseline.build"].stage.predicted == alone["build"].stage.predicted
    assert found["build"].stage.predicted["weights"] < alone["build"].stage.predicted["weights"]


def test_a_model_of_the_hub_is_downloaded_whole(tmp_path):
    words = ("model=llama_3_2_1b", "prune=depth", "prune.layers=12", "quant=fp8", HERE)
    made = plan(tmp_path, *words, target="build")
    assert nodes(made)["download"].stage.shape.num_hidden_layers == 16
    assert made.deployment.shape.num_hidden_layers == 12


def test_a_diagnosis_compares_with_the_pruned_model(tmp_path):
    found = nodes(plan(tmp_path, HERE, *WIDTH, "quant=fp8", target="diagnose"))
    assert found["diagnose"].inputs["model"] == found["diagnose"].inputs["compressed"] == "prune_model"
    assert found["quantize"].inputs["model"] == "prune_model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prune.mlp=512",), r"mlp=512 has no effect on prune=none: add prune=width"),
        (("prune=depth",), r"layers is null, but prune=depth needs a size: add prune.layers=\.\.\."),
        (("prune=width",), r"mlp is null, but prune=width needs a size"),
        ((*DEPTH, "prune.mlp=512"), "mlp=512 has no effect on prune=depth: add prune=width"),
        (("prune=width", "prune.kv_heads=1"), r"kv_heads=1 needs prune.heads="),
        ((*DEPTH, "prune.texts=null"), "texts is null, but prune=depth needs it"),
        (("model=tiny_llama", "prune=width", "prune.mlp=768"), "prune.mlp=768 removes nothing.*768 MLP channels"),
        (("model=tiny_llama", "prune=width", "prune.heads=3"), "prune.heads=3 with 2 KV heads does not work"),
        (
            ("model=llama_3_2_1b", "prune=width", "prune.heads=4", "prune.kv_heads=3"),
            r"at most 4 as in the model.*prune.heads=3\|6\|9\|12.*Or set prune.kv_heads=1\|2\|4\.",
        ),
        ((*DEPTH, "prune.layers=4"), "prune.layers=4 removes nothing: the model has 4 layers"),
        (
            ("model=tiny_llama", "prune=width", "prune.mlp=500", "quant=int4_awq"),
            "prune.mlp=500 .* not a multiple of 128. Nearest: prune.mlp=384 or prune.mlp=512",
        ),
        ((*DEPTH, "engine=tensorrt_llm_llmapi"), "prune=depth conflicts with engine="),
        ((*DEPTH, "lora=adapters", "lora.adapters={1:/a}"), "prune=depth conflicts with lora.adapters"),
        ((*DEPTH, "fidelity.by_layer=true"), "prune=depth conflicts with fidelity.by_layer=true"),
    ],
)
def test_what_cannot_be_pruned_is_refused_while_planning(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        plan(tmp_path, HERE, *words)


def test_a_model_that_does_not_fit_while_layers_are_tried_is_refused(tmp_path):
    small = replace(MACHINE, memory_bytes=8 * 2**30)
    words = (HERE, "model=llama_3_8b", "quant=int4_wo", "build.max_batch_size=1", "eval.baseline=skip")
    with pytest.raises(UserError, match=r"needs about 2\d\.\d GiB of memory while pruning"):
        plan(tmp_path, *words, "prune=depth", "prune.layers=24", target="build", machine=small)
    plan(tmp_path, *words, "prune=width", "prune.mlp=8192", target="build", machine=small)


@pytest.mark.parametrize("words", [WIDTH, DEPTH, (*WIDTH, "prune.kv_heads=1", "sparsity=magnitude_2_4")])
def test_the_word_of_a_variant_says_how_to_make_it(words):
    settings = load([*words, "quant=fp8"])
    again = load(["model=tiny_llama", *Variant.of(settings.variant.label).overrides])
    assert again.prune == settings.prune
    assert again.variant == settings.variant
    assert Variant.of(settings.variant.label) == settings.variant
    assert not settings.baseline().prune.prunes


def test_a_shape_remembers_what_it_was_pruned_from_and_equals_one_that_was_not():
    sizes = (2, 64, 4, 2, 16, 128, 100, 64)
    shape = ModelShape("LlamaForCausalLM", *sizes, False)
    assert replace(shape, pruned_from=shape) == shape
    assert shape.unpruned is shape
