"""Published accuracies: what the file holds, and how they stand beside a measured one."""

from eval.compare import published_table, reference_rows
from eval.results import all_references, differences, references_of
from pipelines.document.blocks import render_text


def test_every_reference_is_a_plausible_fact() -> None:
    found = all_references()
    assert len(found) == len(set(found)) >= 20
    for each in found:
        assert each.task == "mmlu"
        assert 25 < each.accuracy < 100
        assert each.model.split("/")[0] in ("meta-llama", "google")
    families = ("Llama-2", "Llama-3-", "Llama-3.1", "Llama-3.2", "gemma")
    assert all(any(family in each.model for each in found) for family in families)


def test_a_model_is_found_by_its_configuration_or_its_name_on_the_hub() -> None:
    ours = references_of("llama_3_1_8b", "mmlu")
    assert [(each.qformat, each.kv_cache, each.accuracy) for each in ours] == [
        ("none", "16 bit", 66.06),
        ("NVFP4", "FP8", 63.16),
        ("FP8_PER_CHANNEL_PER_TOKEN", "16 bit", 65.55),
    ]
    assert references_of("meta-llama--Llama-3.1-8B", "mmlu") == ours
    assert references_of("llama_3_1_8b", "mini_mmlu") == ()
    assert references_of("", "mmlu") == ()


def test_measured_and_published_stand_in_one_table(result) -> None:
    """65 of 100 right; NVIDIA has 66.06 % in 16 bit."""
    here = result([1] * 65 + [0] * 35, model="llama_3_1_8b", qformat="fp8", task="mmlu", num_fewshot=0)
    text = render_text([published_table([here])])
    lines = [line.split() for line in text.splitlines()]
    assert ["measured", "fp8", "–", "65.00", "–"] in lines
    assert ["published", "none", "16", "bit", "66.06", "-1.06"] in lines
    assert max(map(len, text.splitlines())) <= 80
    assert "questions 100 here and 4,104 there" in " ".join(text.split())
    assert "worked examples 0 here and 5 there" in differences(here)
    assert "no verdict" in differences(here)
    (row,) = reference_rows([here])
    assert (row["accuracy"], row["published"][0]["accuracy"]) == (0.65, 66.06)
