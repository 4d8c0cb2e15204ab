"""adapter_config.json of strangers: read as peft reads it, or refused by name, for both engines and at plan time."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.domain.adapter import check_config, scalings
from pipelines.domain.errors import UserError
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.store.manifest import HashCache
from pipelines.store.sources import adapter_source
from pipelines.store.store import Store
from tests.support.adapters import two_linears, write_adapter
from tests.unit.core.test_plan import MACHINE

Q = "model.layers.{}.self_attn.q_proj"
RANKS = {Q.format(number): 4 for number in (0, 1, 10, 11)}


def scaled(**config: Any) -> list[float]:
    """Scaling of q_proj in layers 0, 1, 10 and 11, with rank 4 and alpha 8."""
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    check_config(whole, "f")
    return list(scalings(whole, "f", RANKS).values())


@pytest.mark.parametrize(
    ("alphas", "expected"),
    [
        ({"q_proj": 4}, [1, 1, 1, 1]),
        ({"proj": 4}, [2, 2, 2, 2]),  # a part of a name is none
        ({r"layers\.1\..*": 4}, [2, 1, 2, 2]),
        ({"layers.1.self_attn.q_proj": 4, "q_proj": 16}, [4, 1, 4, 4]),  # the first wins
        ({"q_proj": 16, "layers.1.self_attn.q_proj": 4}, [4, 4, 4, 4]),
        ({"^model.layers.1.self_attn.q_proj": 4}, [2, 1, 2, 2]),
        ({r"model\.layers\.(0|10)\.self_attn.*": 4.0, "k_proj": 1}, [1, 2, 1, 2]),
        ({r".*\.1\d\.[a-z_]+\.(q|v)_proj": 12}, [2, 2, 3, 3]),
        ({"q_proj": 0, "nothing": 5}, [0, 0, 0, 0]),
        ({}, [2, 2, 2, 2]),
    ],
)
def test_the_first_pattern_that_matches_gives_alpha(alphas: dict[str, float], expected: list[float]) -> None:
    assert scaled(alpha_pattern=alphas) == expected


def test_ranks_come_from_their_patterns_and_absent_numbers_are_pefts() -> None:
    assert scaled(r=64, rank_pattern={r"layers\.\d+\..*": 4}) == [2, 2, 2, 2]
    assert scaled(use_rslora=True) == [4, 4, 4, 4]
    assert scalings({"peft_type": "LORA"}, "f", {Q.format(0): 8}) == {Q.format(0): 1.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3", "feedforward_modules": ["down_proj"]}, r"f has peft_type='IA3'\. Allowed: \"LORA\"\."),
        ({"peft_type": None}, "peft_type=None"),
        ({"peft_type": "PROMPT_TUNING"}, r"='PROMPT_TUNING'\..* build\.max_prompt_embedding_table_size"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\].*acts on the tokens after"),
        ({"use_dora": True}, r"use_dora=True\. Allowed: null, false\. Train a plain"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*path_initial_model"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"use_qalora": True, "lora_bias": True}, r"lora_bias=True(.|\n)*Train|use_qalora=True"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication="),
        ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices="),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters="),
        ({"use_bdlora": {}}, r"use_bdlora=\{\}"),
        ({"velora_config": {}}, r"velora_config=\{\}"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config="),
        ({"megatron_config": {"hidden_size": 4}}, "megatron_config="),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"layers_pattern": "h", "layers_to_transform": [0]}, "layers_pattern='h'"),
        ({"use_newest_lora": 2}, "use_newest_lora=2, a key that is not known here.*or no such key"),
        ({"r": 0}, r"r=0\. It must be a whole number of at least 1"),
        ({"r": True}, "r=True"),
        ({"r": 4.0}, r"r=4\.0"),
        ({"r": 8}, f"r=8, but A of {Q.format(0)} has 4 rows"),
        ({"rank_pattern": {"layers.10.*": 2}}, rf"rank_pattern\.'layers\.10\.\*'=2, but A of {Q.format(10)} has 4"),
        ({"rank_pattern": {"v_proj": 0}}, r"rank_pattern\.'v_proj'=0"),
        ({"rank_pattern": [4]}, r"rank_pattern=\[4\]"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan. It must be a number"),
        ({"lora_alpha": "16"}, "lora_alpha='16'"),
        ({"lora_alpha": 10**400}, "lora_alpha="),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\.'q_proj'=None"),
        ({"alpha_pattern": {"(q_proj": 4}}, r"pattern '\(q_proj': .*unterminated subpattern"),
        ({"target_modules": ["v_proj"]}, rf"target_modules=\['v_proj'\], which leaves out {Q.format(0)}"),
        ({"target_modules": {"q_proj": 1}}, "target_modules=.*must be a list"),
        ({"exclude_modules": ["10.self_attn.q_proj"]}, f"exclude_modules=.*leaves out {Q.format(10)}"),
        ({"layers_to_transform": [0, 1, 10]}, rf"layers_to_transform=\[0, 1, 10\], which leaves out {Q.format(11)}"),
        ({"layers_to_transform": 0}, f"layers_to_transform=0, which leaves out {Q.format(1)}"),
        ({"layers_to_transform": "0"}, "layers_to_transform='0'"),
    ],
)
def test_what_means_more_or_contradicts_the_matrices_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scaled(**config)


def test_what_means_nothing_is_taken() -> None:
    nothing = {"enable_lora": None, "merge_weights": False, "later_key": {}, "alora_invocation_tokens": []}
    chosen = {"target_modules": ".*q_proj", "exclude_modules": [], "layers_to_transform": [0, 1, 10, 11]}
    unread = {"lora_dropout": 0.5, "revision": "v2", "inference_mode": True, "eva_config": {"rho": 2.0}}
    assert scaled(**nothing, **chosen, **unread, init_lora_weights="eva") == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "patterns",
    [
        [r"(\w+\.)*q_proj"],  # a choice in a repeated group
        ["(q|k|v)+_proj"],
        ["q_proj" * 200],  # long
        [".*" * 8 + "q_proj"],  # many repetitions after one another
        ["q?" * 40],
        ["(q|q)" * 31],  # words that begin another are choices
        ["(?i)q_proj"],
        ["?i:q_proj"],  # flags, in peft's own group
        ["q)(k"],  # closes peft's own group
        [".*.*.*.*(" + "|".join(f"m{number}" for number in range(200)) + ")"],  # each word costs time
        [f"layers.{number}.x" for number in range(20_001)],
    ],
)
def test_patterns_that_could_match_for_long_are_refused_unmatched(patterns: list[str]) -> None:
    """None of these is a trap itself: they are of the forms that traps have."""
    with pytest.raises(UserError, match=rf"f: alpha_pattern has {len(patterns)} patterns?, and .* could take too long"):
        scaled(alpha_pattern=dict.fromkeys(patterns, 4))


def test_a_pattern_for_each_module_of_a_large_model_is_taken() -> None:
    modules = {Q.format(number): 4 for number in range(900)}
    found = scalings(
        {"peft_type": "LORA", "r": 4, "alpha_pattern": {name: number for number, name in enumerate(modules)}},
        "f",
        modules,
    )
    assert found[Q.format(899)] == 899 / 4


BLOCKS = "self_attn|attention|attn|mlp|feed_forward|ffn|dense"
LINEARS = "gate_proj|up_proj|v_proj|q_proj|k_proj|down_proj|o_proj"
UNSLOTHS = (
    rf"(?:.*?(?:language|text).*?(?:{BLOCKS}).*?(?:{LINEARS}).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{BLOCKS})\.(?:(?:{LINEARS})))",
    rf"(?:.*?(?:language|text).*?(?:{BLOCKS}|attn).*?\.(?:{LINEARS}))"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:{BLOCKS}|attn).*?\.(?:(?:{LINEARS})))",
)
"""What Unsloth's `get_peft_regex` makes of a list of linears, as adapters on the Hub have it (2025, 2026)."""


@pytest.mark.parametrize("pattern", UNSLOTHS)
@pytest.mark.parametrize("name", ["model.layers.{}.self_attn.q_proj", "model.language_model.layers.{}.mlp.up_proj"])
def test_unsloths_pattern_of_a_large_model_is_taken(pattern: str, name: str) -> None:
    modules = {name.format(number): 4 for number in range(700)}
    found = scalings({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": pattern}, "f", modules)
    assert set(found.values()) == {1}
    with pytest.raises(UserError, match=r"leaves out model\.layers\.0\.self_attn\.qkv"):
        scalings({"r": 4, "target_modules": pattern}, "f", {"model.layers.0.self_attn.qkv": 4})


def source(folder: Path, tmp_path: Path) -> Any:
    return adapter_source(folder, HashCache(tmp_path / "cache"), "lora.adapters.1")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (a_folder, "is not an ordinary file"),
        (a_pipe, "is not an ordinary file"),
        (sparse, "has 1,?099,?511,?627,?776 bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not valid JSON|damaged or truncated"),
        (lambda path: path.write_text("[]"), "is not a JSON object|damaged or truncated"),
        (Path.unlink, "has no {}"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, spoil: Any, message: str) -> None:
    folder = write_adapter(tmp_path / "a", two_linears())
    spoil(folder / name)
    with pytest.raises(UserError, match=f"{re.escape(name)}.*|{name}") as refused:
        source(folder, tmp_path)
    assert re.search(message.format(name), str(refused.value))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"0.self_attn.qkv_proj.lora_A": [[1]]},
            r"no LoRA matrix of a known linear.* or merge it into its model",
        ),
        ({"0.self_attn.q_proj.lora_B.bias": [1]}, r"holds '.*lora_B\.bias\.weight', which is no LoRA matrix"),
        ({"0.self_attn.q_proj.lora_magnitude_vector": [1]}, "holds '.*lora_magnitude_vector"),
        ({"0.mlp.q_proj.lora_A": [[1]]}, r"holds '.*mlp\.q_proj"),
        ({"00.mlp.up_proj.lora_A": [[1]]}, r"holds '.*up_proj"),
        ({"0.mlp.experts.0.up_proj.lora_A": [[1]]}, "holds '.*up_proj"),
        ({"0.self_attn.k_proj.lora_A": np.zeros((0, 3)), "0.self_attn.k_proj.lora_B": np.zeros((4, 0))}, "has 0 rows"),
        ({"0.self_attn.k_proj.lora_A": [1, 2], "0.self_attn.k_proj.lora_B": [[1]]}, r"k_proj has lora_A \[2\], lora_B"),
    ],
)
def test_tensors_that_are_no_matrices_of_linears_are_refused(tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(write_adapter(tmp_path / "a", {**two_linears(), **tensors}), tmp_path)


def test_other_files_of_the_folder_neither_count_nor_are_waited_for(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", two_linears())
    before, adapter = source(folder, tmp_path)
    sparse(folder / "optimizer.pt")
    assert source(folder, tmp_path)[0].digest == before.digest
    assert (adapter.rank, adapter.layers, adapter.modules) == (2, 2, ("down_proj", "q_proj"))


@pytest.mark.parametrize("engine", ["openvino", "tensorrt_llm"])
def test_both_engines_refuse_at_plan_time(tmp_path: Path, engine: str) -> None:
    folder = write_adapter(tmp_path / "a", two_linears(), alora_invocation_tokens=[5])
    config = json.loads((folder / "adapter_config.json").read_text())
    words = [f"engine={engine}", "quant=none", "quant.dtype=float16", "lora=adapters", f"lora.adapters={{1:{folder}}}"]
    with pytest.raises(UserError, match=r"a/adapter_config\.json has alora_invocation_tokens=\[5\]"):
        make_plan(load(words), "repository", Store(tmp_path / "store"), MACHINE)
    del config["alora_invocation_tokens"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trained for another model"):
        make_plan(load(words), "repository", Store(tmp_path / "store"), MACHINE)
