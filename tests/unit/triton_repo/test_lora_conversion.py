"""Adapters for TensorRT-LLM: every value in its place, and nothing left out without a word."""

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from tests.support.adapters import two_linears, write_adapter
from tests.support.engine_folders import write_engine, write_tokenizer
from triton_repo.check import check_repository
from triton_repo.config import TritonSettings
from triton_repo.generate import parse
from triton_repo.parameters import RepositorySpec
from triton_repo.write import CONFIG, WEIGHTS, convert, write_repository

MODULES = ["attn_q", "mlp_4h_to_h"]


def lora_engine(folder, rank=8, dtype="float16", modules=MODULES):
    """An engine folder built with the LoRA plugin."""
    engine = write_engine(
        folder,
        plugin_config={"use_paged_context_fmha": True, "lora_plugin": "auto"},
        lora_config={"max_lora_rank": rank, "lora_target_modules": list(modules)},
    )
    config = engine / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', f'"dtype": "{dtype}"', 1))
    return engine


def test_every_value_is_in_its_place(tmp_path):
    """Layer 0 before layer 1; B times alpha / r = 4 / 2; the shorter row ends in zeros."""
    weights, config = convert(write_adapter(tmp_path, two_linears()))
    assert (weights.dtype, config.dtype) == (np.float16, np.int32)
    assert config.tolist() == [[[6, 0, 2], [1, 1, 2]]]  # (mlp_4h_to_h, layer 0, rank 2), (attn_q, layer 1, rank 2)
    assert weights.tolist() == [
        [
            [7, 8, 9, 10, 0.5, 0, 0, 0.5, 2, 4, 0, 0, 0, 0],
            [1, 2, 3, 4, 5, 6, 2, 0, 0, 2, 2, 2, -2, 1],
        ]
    ]


def test_the_matrices_can_be_read_back(tmp_path):
    """What the runtime does: A is [rank, inputs], the rest is B [outputs, rank]; their product is the change."""
    given = two_linears()
    weights, config = convert(write_adapter(tmp_path, given), "float32")
    widths = {6: (2, 3), 1: (3, 4)}  # inputs, outputs
    names = {6: "0.mlp.down_proj", 1: "1.self_attn.q_proj"}
    for row, (module, _, rank) in zip(weights[0], config[0], strict=True):
        inputs, outputs = widths[module]
        inside = row[: rank * inputs].reshape(rank, inputs)
        outside = row[rank * inputs : rank * (inputs + outputs)].reshape(outputs, rank)
        name = names[module]
        wanted = 2 * np.array(given[f"{name}.lora_B"]) @ np.array(given[f"{name}.lora_A"])
        assert np.allclose(outside @ inside, wanted)


def test_rslora_has_its_own_scaling(tmp_path):
    """Alpha / sqrt(r) = 6 / 2 = 3 for r = 4."""
    tensors = {"0.self_attn.v_proj.lora_A": np.eye(4), "0.self_attn.v_proj.lora_B": np.ones((1, 4))}
    weights, _ = convert(write_adapter(tmp_path, tensors, r=4, lora_alpha=6, use_rslora=True))
    assert weights[0, 0, 16:].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"use_dora": True}, "use_dora=True"),
        ({}, {"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"0.self_attn.q_norm.lora_A": [[1]]}, {}, "'.*q_norm.lora_A.weight', which is no LoRA matrix"),
        (
            {"0.self_attn.k_proj.lora_A": [[1, 2]]},
            {},
            r"0\.self_attn\.k_proj has lora_A \[1, 2\], lora_B missing\. A is \[rank, inputs\]",
        ),
        (
            {"0.mlp.up_proj.lora_A": [[1e6]] * 2, "0.mlp.up_proj.lora_B": [[1, 1]]},
            {},
            "values that float16 cannot hold",
        ),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, tensors, config, message):
    with pytest.raises(UserError, match=message):
        convert(write_adapter(tmp_path, {**two_linears(), **tensors}, **config))


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not an adapter: it has no adapter_config\.json"):
        convert(tmp_path)


def make(tmp_path, engine, settings=None, flavour="tensorrt_llm"):
    write_repository(
        tmp_path / "repo",
        engine_dir=engine,
        tokenizer_dir=write_tokenizer(tmp_path / "model"),
        settings=settings or TritonSettings(),
        spec=RepositorySpec(flavour, "llama", "none", lora_tasks=(3, 12)),
        made_from={},
        adapters={task: write_adapter(tmp_path / f"adapter{task}", two_linears()) for task in (3, 12)},
    )
    return tmp_path / "repo"


def prefetch(repo):
    config = parse((repo / "tensorrt_llm" / "config.pbtxt").read_text())
    return config.parameters["lora_prefetch_dir"].string_value


def test_the_gpu_repository_has_converted_adapters_that_load_at_the_start(tmp_path):
    repo = make(tmp_path, lora_engine(tmp_path / "engine"))
    folder = repo / prefetch(repo)
    assert sorted(path.name for path in folder.iterdir()) == ["12", "3"]  # the backend takes numbers for task ids
    weights, _ = convert(tmp_path / "adapter3")
    assert np.load(folder / "3" / WEIGHTS).tolist() == weights.tolist()
    assert np.load(folder / "12" / CONFIG).shape == (1, 2, 3)
    assert check_repository(repo) == []


def test_the_cpu_repository_has_the_adapters_themselves(tmp_path):
    repo = make(tmp_path, write_engine(tmp_path / "engine", "openvino"), flavour="openvino")
    names = {path.name for path in (repo / prefetch(repo) / "3").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"rank": 1}, "has rank 2; the engine was built for 1"),
        ({"modules": ["attn_q", "attn_v"]}, "changes mlp_4h_to_h; the engine was built for attn_q, attn_v"),
        ({"dtype": "bfloat16"}, "computes in bfloat16; an adapter must have the engine's type"),
    ],
)
def test_an_adapter_that_the_engine_cannot_serve_is_refused(tmp_path, engine, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path, lora_engine(tmp_path / "engine", **engine))


def test_an_engine_without_the_plugin_is_refused(tmp_path):
    with pytest.raises(UserError, match="built without the LoRA plugin"):
        make(tmp_path, write_engine(tmp_path / "engine"))


def test_two_places_for_adapters_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"lora_prefetch_dir='/elsewhere' conflicts with lora\.adapters"):
        make(tmp_path, lora_engine(tmp_path / "engine"), TritonSettings(lora_prefetch_dir="/elsewhere"))
