"""The refusal of a model of another family: what sets it apart, and who serves it."""

import importlib

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.not_built import APART, SERVED


@pytest.mark.parametrize(
    ("architecture", "apart", "todo"),
    [
        ("SmolLM3ForCausalLM", "a Llama with layers without positions", "trtllm-serve FOLDER --backend _autodeploy"),
        ("Olmo2ForCausalLM", "a Llama with norms after attention and MLP and none before", "make benchmark"),
        ("Glm4ForCausalLM", "a Qwen2 that rotates neighbouring channels .* only half of them", "make benchmark"),
        ("Cohere2ForCausalLM", "a Llama whose attention and MLP stand side by side", r"trtllm-serve FOLDER\. To"),
        ("Exaone4ForCausalLM", "a Qwen3 with norms after attention", r"trtllm-serve FOLDER\. To measure"),
        ("InternLM3ForCausalLM", "a Llama in code of its own folder", "trtllm-serve FOLDER --backend _autodeploy"),
    ],
)
def test_what_sets_a_model_apart_is_said(architecture: str, apart: str, todo: str) -> None:
    with pytest.raises(UserError, match=f"'{architecture}', which this project does not build: it is {apart}.*{todo}"):
        ModelShape.from_hf_config({"architectures": [architecture]}, "config.json")


def test_who_serves_a_model_that_is_only_listed_is_said() -> None:
    with pytest.raises(UserError, match=r"'NemotronForCausalLM', which this .* not know\. .*lists it: trtllm-serve"):
        ModelShape.from_hf_config({"architectures": ["NemotronForCausalLM"]}, "config.json")


def test_every_row_is_of_another_family_whose_nearest_is_built() -> None:
    titles = {family.title for family in FAMILIES.values()}
    assert not (APART.keys() | SERVED.keys()) & FAMILIES.keys()
    assert all(text.split()[1] in titles for text in APART.values())


def test_what_is_said_of_norms_and_pairs_holds_in_transformers() -> None:
    """Tiny models of Transformers' own classes, so that a name of a norm or a rotation that changes is noticed."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}
    for architecture, text in APART.items():
        name = architecture.removesuffix("ForCausalLM")
        if name == "InternLM3":
            assert not hasattr(transformers, f"{name}Config")
            continue
        config = getattr(transformers, f"{name}Config")(**sizes)
        with torch.device("meta"):
            layer = getattr(transformers, architecture)(config).model.layers[0]
        assert hasattr(layer, "input_layernorm") != ("none before" in text), name
        module = importlib.import_module(type(layer).__module__)
        turned = module.rotate_half(torch.arange(4.0))
        assert (turned.tolist() == [-1, 0, -3, 2]) == ("neighbouring" in text), name
