"""What a search refuses: formats that are not mixed, and bits that its candidates cannot reach."""

import re

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat, mix_faults, tuning_faults
from pipelines.settings.compose import load

FP8, INT4, INT8 = QFormat.FP8, QFormat.INT4_AWQ, QFormat.INT8_SQ


@pytest.mark.parametrize(
    ("candidates", "bits", "message"),
    [
        ((FP8, INT4), 3.9, r"effective_bits=3\.9 is out of reach of .*fp8,int4_awq\. Reachable: 4, all .* in int4_awq"),
        ((FP8,), 7.5, r"effective_bits=7\.5 is out of reach .*Reachable: 8, all linears in fp8, up to less than 16"),
        ((FP8, INT4), 16, r"effective_bits=16 is out of reach"),
        ((FP8, INT8), 8, "fp8 and int8_sq, which TensorRT-LLM does not mix"),
        ((QFormat.INT8_WO, FP8), 8, "has int8_wo, which cannot be mixed. Candidates: fp8, int8_sq, int4_awq, w4a8_awq"),
        ((QFormat.NVFP4, FP8), 8, "has nvfp4, which cannot be mixed"),
        ((FP8, FP8), 8, "quant.candidates=fp8,fp8"),
        ((), 8, "at least one"),
    ],
)
def test_what_cannot_be_searched_is_refused(candidates, bits, message) -> None:
    assert re.search(message, " ".join(map(str, mix_faults(candidates, bits))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quant=fp8", "quant.effective_bits=6"], r"effective_bits=6\.0 has no effect on quant=fp8: add quant=auto"),
        (["quant=auto", "quant.scoring=null"], "scoring is null, but quant=auto needs it"),
        (["quant=auto", "quant.scoring=hessian"], "hessian"),
        (["quant=fp8", "quant.candidates=[fp8,int4_awq]"], r"candidates=\[fp8,int4_awq\] has no effect on quant=fp8"),
        (["quant=auto", "quant.candidates=[]"], r"candidates=\[\] leaves nothing to choose"),
        (["recover.lora_targets=[q_proj,v_proj]"], r"lora_targets=\[q_proj,v_proj\] has no effect on recover=none"),
    ],
)
def test_settings_of_a_search_go_with_auto(words, message) -> None:
    with pytest.raises(UserError, match=message):
        load(words)


def test_options_of_an_algorithm_go_with_a_format_that_is_made_by_it() -> None:
    (fault,) = tuning_faults((FP8, INT4), 0.5, 0.1)
    assert (
        str(fault)
        == "quant.smoothquant_alpha=0.5 has no effect on fp8 and int4_awq. It applies to int8_sq. Leave it out."
    )
    assert tuning_faults((INT8, INT4), 0.5, 0.1) == []


def test_a_candidate_a_draft_and_a_baseline_have_what_their_format_reads() -> None:
    mix = load(["quant=auto", "quant.awq_alpha_step=0.5", "quant.group_size=64"]).quant
    assert mix.of(QFormat.AUTO) == mix
    awq, fp8 = mix.of(INT4), mix.of(FP8)
    assert (awq.qformat, awq.awq_alpha_step, awq.group_size, awq.scoring_texts) == (INT4, 0.5, 64, None)
    assert fp8.awq_alpha_step is None
    rtn = load(["quant=int4_rtn", "quant.int4_scales=mse"]).quant
    assert (rtn.of(rtn.qformat).int4_scales, rtn.of(QFormat.NONE).int4_scales) == ("mse", "max")


def test_a_mix_of_6_bits_counts_the_scales_of_its_groups() -> None:
    """At most 6 bits and 16 more for 128 weights: 6.125."""
    assert load(["quant=auto"]).quant.mean_bits == 6.125
    assert load(["quant=int4_awq"]).quant.mean_bits is None


def test_the_baseline_and_a_draft_of_a_mix_have_no_candidates() -> None:
    """A copy in another format does not calibrate what the search would have chosen from."""
    mix = load(["quant=auto"]).quant
    assert (mix.formats, mix.mixed) == ((FP8, INT4), (FP8, INT4))
    half = mix.model_copy(update={"qformat": QFormat.NONE})
    assert (half.formats, half.mixed, half.mean_bits) == ((QFormat.NONE,), (), None)
