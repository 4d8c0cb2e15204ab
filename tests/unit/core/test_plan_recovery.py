"""Planning recovery training: what is trained, what memory that takes, and what is refused before it begins."""

import importlib.util
from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.variant import Variant
from pipelines.host.machine import GpuFacts
from pipelines.plan.plan import make_plan
from pipelines.plan.weights_checks import training_memory_bytes
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.unit.core.test_plan_fidelity import MACHINE

SPARSE = ("engine=openvino", "model=tiny_llama", "sparsity=magnitude_2_4", "quant=none", "recover=distill")
LOW = (*SPARSE, "recover.lora_rank=8")
ROUNDED = ("engine=openvino", "model=tiny_llama", "quant=int4_rtn", "recover=distill")
LARGE = ("engine=openvino", "model=llama_3_8b", "quant=int4_rtn", "recover=finetune", "eval.baseline=skip")
SMALL_SHAPE = ("build.max_batch_size=1", "build.max_input_len=512", "build.max_seq_len=1024")


def plan(tmp_path, *overrides, machine=MACHINE, target="build"):
    settings = load([f"paths.store={tmp_path / 'store'}", *overrides])
    return make_plan(settings, target, Store(settings.paths.store), machine)


def stage(made):
    return next(step.node.stage for step in made.steps if step.node.id == "recover")


def notes(made):
    return [note for note in made.notes if "train" in note]


def test_low_rank_is_counted_in_the_plan(tmp_path):
    """7 linears of 4 layers: 16 x (in + out) each, by hand."""
    made = plan(tmp_path, *SPARSE, "recover.lora_rank=16")
    numbers = 4 * 16 * (512 + 384 + 384 + 512 + 1024 + 1024 + 1024)
    assert f"of 4,065,536 weights none is trained itself: {numbers:,} of rank 16 are" in notes(made)[1]
    assert stage(made).spec.recover.alpha == 32
    assert stage(made).needs[-1] == "peft"
    assert "peft" not in stage(plan(tmp_path, *SPARSE)).needs


@pytest.mark.parametrize("words", [(), ("sparsity=magnitude_2_4",), ("recover.gradient_checkpointing=true",)])
def test_memory_of_low_rank_is_that_of_what_it_trains(tmp_path, words):
    """All weights take 16 bytes each; with low rank, 4, and 16 for each number of the matrices."""
    whole, low = (plan(tmp_path, *ROUNDED, *words, *more) for more in ((), ("recover.lora_rank=16",)))
    numbers = 4 * 16 * (512 + 384 + 384 + 512 + 1024 + 1024 + 1024)
    needed = [training_memory_bytes(made.deployment.shape, made.settings) for made in (whole, low)]
    assert needed[0] - needed[1] == 12 * 4_065_536 - 16 * numbers


def test_rounded_weights_are_counted_where_they_are_held(tmp_path):
    """One float32 for each weight of the linears, of one layer where activations are checkpointed."""
    words = ("engine=openvino", "model=tiny_llama", "recover=distill", "sparsity=magnitude_2_4")
    plain, rounded = (plan(tmp_path, *words, f"quant={qformat}") for qformat in ("none", "int4_rtn"))
    linears = plain.deployment.shape.linear_params
    needed = [training_memory_bytes(made.deployment.shape, made.settings) for made in (plain, rounded)]
    assert needed[1] - needed[0] == 4 * linears
    checkpointed = [
        plan(tmp_path, *words, f"quant={qformat}", "recover.gradient_checkpointing=true").settings
        for qformat in ("none", "int4_rtn")
    ]
    needed = [training_memory_bytes(plain.deployment.shape, settings) for settings in checkpointed]
    assert needed[1] - needed[0] == linears


def test_each_process_needs_its_own_memory(tmp_path):
    one, two = (plan(tmp_path, *SPARSE, f"recover.processes={number}") for number in (1, 2))
    assert stage(two).processes == stage(two).spec.processes == 2
    assert "in each of 2 processes" in notes(two)[0]
    assert "processes" not in notes(one)[0]


def test_a_model_that_does_not_fit_names_what_would_help(tmp_path):
    machine = replace(MACHINE, memory_bytes=64 * 2**30)
    with pytest.raises(UserError, match=r"needs about 176\.5 GiB .* Set recover.lora_rank=16, recover.batch_size=1"):
        plan(tmp_path, *LARGE, *SMALL_SHAPE, machine=machine)
    low = ("recover.lora_rank=16", "recover.batch_size=1", "recover.gradient_checkpointing=true")
    assert plan(tmp_path, *LARGE, *SMALL_SHAPE, *low, machine=machine).notes
    words = ("recover.lora_rank=16", "recover.batch_size=2", "recover.processes=2")
    with pytest.raises(
        UserError, match=r"Set recover.processes=1, recover.gradient_checkpointing=true, take a smaller"
    ):
        plan(tmp_path, *LARGE, *SMALL_SHAPE, *words, machine=machine)


def test_gpus_share_a_batch_as_far_as_they_divide_it(tmp_path, monkeypatch):
    for module in ("deployment", "weights_checks"):
        monkeypatch.setattr(f"pipelines.plan.{module}.torch_device", lambda _machine: "cuda")
    gpu = GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 81559 * 2**20)
    for count, used in ((1, 1), (3, 2), (4, 4), (8, 8)):
        made = plan(tmp_path, *SPARSE, machine=replace(MACHINE, gpus=(gpu,) * count))
        assert stage(made).processes == used
    with pytest.raises(UserError, match=r"recover.processes=4 is more than the 2 GPUs of this machine"):
        plan(tmp_path, *SPARSE, "recover.processes=4", machine=replace(MACHINE, gpus=(gpu,) * 2))
    small = GpuFacts("small", 9.0, 2**30)
    with pytest.raises(UserError, match=r"memory while training \(modelled\); each GPU has 1\.0 GiB"):
        plan(tmp_path, *SPARSE, machine=replace(MACHINE, gpus=(small,)))


def test_a_part_of_the_model_is_what_a_process_needs_memory_for(tmp_path):
    """By hand, for tiny_llama: of whole weights, those of embedding, head and norms, and of two of four layers."""
    whole, parts = (plan(tmp_path, *SPARSE, "recover.processes=2", *more) for more in ((), ("recover.sharding=full",)))
    assert stage(parts).spec.recover.sharding == "full"
    assert "its part of the model, in each of 2 processes" in notes(parts)[0]
    linear, others = 3_145_728, 4_065_536 - 3_145_728
    needed = [training_memory_bytes(made.deployment.shape, made.settings, 2) for made in (whole, parts)]
    held = 16 * (linear + others) + 4 * (linear + others) + linear  # of the model, its teacher, and masks
    exchanged = 4 * (linear + others)
    collected = 4 * (others + 2 * linear / 4) + 8 * (others + linear / 4)
    assert needed[0] - needed[1] == held / 2 + exchanged - collected


def test_what_does_not_fit_one_gpu_fits_several_that_share_it(tmp_path, monkeypatch):
    for module in ("deployment", "weights_checks"):
        monkeypatch.setattr(f"pipelines.plan.{module}.torch_device", lambda _machine: "cuda")
    machine = replace(MACHINE, gpus=(GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 81559 * 2**20),) * 8)
    words = (*LARGE, *SMALL_SHAPE, "recover.gradient_checkpointing=true")
    with pytest.raises(UserError, match=r"each GPU has 79\.6 GiB\. .*Set .*recover.sharding=full, take a smaller"):
        plan(tmp_path, *words, machine=machine)
    assert stage(plan(tmp_path, *words, "recover.sharding=full", machine=machine)).processes == 8


@pytest.mark.parametrize(
    ("qformat", "note"),
    [
        ("int4_rtn", ""),
        ("int8_wo", ""),
        ("fp8", "training sees the rounding of weights of quant=fp8, not that of activations"),
        ("nvfp4", "training sees the rounding of weights of quant=nvfp4, not that of activations"),
        ("int4_awq", "training does not see the rounding of quant=int4_awq"),
        ("int4_gptq", "training does not see the rounding of quant=int4_gptq"),
    ],
)
def test_the_plan_says_what_training_does_not_see(tmp_path, qformat, note):
    made = plan(tmp_path, *SPARSE, f"quant={qformat}")
    assert [each for each in notes(made) if "rounding" in each] == (
        [each for each in notes(made) if note in each] if note else []
    )
    assert (stage(made).spec.rounding is None) == ("does not" in note)


def test_the_plan_says_that_split_rows_are_rounded_otherwise(tmp_path):
    words = (*SPARSE, "quant=int4_wo", "build.tp_size=2")
    assert "with build.tp_size=2, trtllm-build gives" in notes(plan(tmp_path, *words))[-1]
    assert not any("tp_size" in note for note in notes(plan(tmp_path, *SPARSE, "quant=int4_wo")))
    assert not any("tp_size" in note for note in notes(plan(tmp_path, *words, "quant=int4_rtn")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*SPARSE, "recover.lora_rank=0"), "recover.lora_rank='0' is not valid"),
        ((*SPARSE, "recover.lora_rank=-4"), "recover.lora_rank='-4' is not valid"),
        ((*LOW, "recover.lora_rank=129"), "recover.lora_rank=129 is larger .* of k_proj, which is 128 x 256"),
        ((*LOW, "recover.lora_rank=257", "recover.lora_targets=[up_proj]"), "lora_rank=257 is .* of up_proj, .* 768"),
        ((*LOW, "recover.lora_targets=[q_proj,c_attn]"), "lora_targets.1='c_attn' is not known. Choose one of q_proj"),
        ((*LOW, "recover.lora_targets=[]"), r"lora_targets=\[\] leaves nothing to train"),
        ((*LOW, "recover.lora_alpha=0"), "recover.lora_alpha='0' is not valid"),
        ((*SPARSE, "recover.lora_alpha=8"), "lora_alpha=8.0 has no effect without low rank: add recover.lora_rank"),
        ((*SPARSE, "recover.lora_targets=[q_proj]"), r"lora_targets=\[q_proj\] has no effect without low rank"),
        ((*SPARSE, "recover.processes=3"), "processes=3 cannot share batch_size=8 evenly"),
        ((*SPARSE, "recover.sharding=full"), "needs recover.processes >= 2: .*recover.batch_size=8"),
        ((*SPARSE, "recover.sharding=half"), "recover.sharding='half' is not known"),
        (("model=tiny_llama", "recover.sharding=full"), "sharding=full has no effect on recover=none"),
        ((*SPARSE, "recover.processes=0"), "recover.processes='0' is not valid"),
        (("model=tiny_llama", "recover.lora_rank=8"), "lora_rank=8 has no effect on recover=none"),
        (("model=tiny_llama", "recover.processes=2"), "processes=2 has no effect on recover=none"),
        ((*ROUNDED, "quant.int4_scales=mse"), "quant=int4_rtn quant.int4_scales=mse has nothing to recover"),
        ((*ROUNDED, "quant=int4_awq"), r"quant=int4_awq has nothing to recover.*quant=fp8 or quant=int4_rtn"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_while_planning(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        plan(tmp_path, *words)


def test_low_rank_without_peft_does_not_run_here(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else real(name, *rest))
    (fault,) = plan(tmp_path, *SPARSE, "recover.lora_rank=8").missing
    assert str(fault) == "Stage recover needs the Python package 'peft', which is not installed. Run: make setup"
    assert plan(tmp_path, *SPARSE).missing == ()


@pytest.mark.parametrize("words", [(), ("recover.lora_rank=16",)])
def test_the_word_of_a_variant_says_how_to_train_it(words):
    settings = load([*SPARSE, "quant=int4_rtn", *words])
    assert settings.variant.label == f"magnitude_2_4-distill{'_lora_16' if words else ''}-int4_rtn"
    again = load(["model=tiny_llama", *Variant.of(settings.variant.label).overrides])
    assert again.recover == settings.recover
    assert again.variant == settings.variant
    assert Variant.of(settings.variant.label) == settings.variant
