"""A sound checkpoint has no faults; every way of breaking one is found and named. Needs numpy only."""

import json
import re
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

from pipelines.checkpoint.config_json import CheckpointConfig  # noqa: E402
from pipelines.checkpoint.describe import describe, render  # noqa: E402
from pipelines.checkpoint.tensors import TensorFile, TensorSpec  # noqa: E402
from pipelines.checkpoint.verify import expected_tensors, tensor_faults, verify  # noqa: E402

CONFIG = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_size": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rotary_base": 10000.0,
    "use_parallel_embedding": True,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
}
BLOCKS = {
    "FP8": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "W4A16_AWQ": {
        "quant_algo": "W4A16_AWQ",
        "group_size": 32,
        "pre_quant_scale": True,
        "has_zero_point": False,
        "exclude_modules": ["lm_head"],
    },
}
BLOCKS["unsmoothed"] = BLOCKS["W4A16_AWQ"] | {"pre_quant_scale": False}
BLOCKS["zero points"] = BLOCKS["unsmoothed"] | {"has_zero_point": True}
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "I8": np.int8}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
MEASURED = Path(__file__).parent / "measured"
FC = "transformer.layers.1.mlp.fc"


def save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write safetensors; the library's numpy side takes neither bfloat16 nor float8."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensor.tobytes() for tensor in tensors.values()))


def load_file(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors as copies, so that the file may be written again."""
    return {name: np.array(tensor) for name, tensor in TensorFile(path).items()}


def write(folder: Path, algo: str, **mapping: int) -> Path:
    """Write a checkpoint full of ones."""
    split = CONFIG["mapping"] | mapping
    split["world_size"] = split["tp_size"] * split["pp_size"]
    raw = CONFIG | {"quantization": BLOCKS[algo], "mapping": split}
    config = CheckpointConfig.parse(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    for rank in range(config.world_size):
        tensors = {n: np.ones(e.shape).astype(DTYPES[e.dtype]) for n, e in expected_tensors(config, rank).items()}
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return folder


def change(folder: Path, **changes: object) -> None:
    """Replace tensors of rank 0; None drops one."""
    path = folder / "rank0.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def faults_of(folder: Path) -> str:
    return "\n".join(map(str, verify(folder)))


@pytest.mark.parametrize("mapping", [{}, {"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}])
@pytest.mark.parametrize("algo", list(BLOCKS))
def test_a_sound_checkpoint_has_no_faults(algo, mapping, tmp_path) -> None:
    assert verify(write(tmp_path, algo, **mapping)) == []


@pytest.mark.parametrize(
    ("algo", "changes", "message"),
    [
        ("FP8", {f"{FC}.weight": None}, f"lacks '{FC}.weight'.*F8_E4M3\\[128, 64\\]"),
        ("FP8", {f"{FC}.weights_scaling_factor": None}, f"lacks '{FC}.weights_scaling_factor'"),
        (
            "FP8",
            {f"{FC}.prequant_scaling_factor": np.ones(64, np.float32)},
            f"unexpected tensor '{FC}.prequant_scaling_factor'",
        ),
        ("FP8", {f"{FC}.weight": np.ones((128, 64), np.int8)}, f"'{FC}.weight' is I8\\[128, 64\\]"),
        ("FP8", {f"{FC}.weight": np.ones((64, 128)).astype(DTYPES["F8_E4M3"])}, r"is F8_E4M3\[64, 128\].*\[128, 64\]"),
        (
            "FP8",
            {f"{FC}.weights_scaling_factor": np.zeros(1, np.float32)},
            f"'{FC}.weights_scaling_factor' has the.* 0",
        ),
        ("FP8", {f"{FC}.weights_scaling_factor": -np.ones(1, np.float32)}, "has the value -1"),
        ("FP8", {f"{FC}.activation_scaling_factor": np.full(1, np.nan, np.float32)}, f"'{FC}.act.* contains NaN"),
        ("FP8", {f"{FC}.weight": np.full((128, 64), np.nan).astype(DTYPES["F8_E4M3"])}, f"'{FC}.weight' contains NaN"),
        (
            "FP8",
            {"transformer.ln_f.weight": np.full(64, np.inf).astype(DTYPES["BF16"])},
            "ln_f.weight' contains NaN or inf",
        ),
        ("FP8", {"lm_head.weight": None}, "lacks 'lm_head.weight'"),
        (
            "FP8",
            {"transformer.layers.0.attention.k_cache_scaling_factor": np.full(1, 2, np.float32)},
            "kv_cache_scaling_factor' is 1, the scales of K and V are 2 and 1",
        ),
        ("W4A16_AWQ", {f"{FC}.weight": np.ones((128, 64), np.int8)}, r"is I8\[128, 64\].*I8\[64, 64\]"),
        ("W4A16_AWQ", {f"{FC}.weights_scaling_factor": np.ones((128, 1), np.float32)}, r"F32\[128, 1\].*F32\[128, 2\]"),
        ("W4A16_AWQ", {f"{FC}.prequant_scaling_factor": None}, f"lacks '{FC}.prequant_scaling_factor'"),
        (
            "unsmoothed",
            {f"{FC}.prequant_scaling_factor": np.ones(64, ml_dtypes.bfloat16)},
            f"unexpected tensor '{FC}.prequant_scaling_factor'",
        ),
        ("zero points", {f"{FC}.zero": None}, rf"lacks '{FC}.zero'.*BF16\[2, 128\]"),
        ("zero points", {f"{FC}.zero": np.full((2, 128), np.nan, ml_dtypes.bfloat16)}, f"'{FC}.zero' contains NaN"),
    ],
)
def test_a_changed_tensor_is_named(algo, changes, message, tmp_path) -> None:
    change(write(tmp_path, algo), **changes)
    assert re.search(message, faults_of(tmp_path))
    assert len(verify(tmp_path)) == 1


def test_a_renamed_tensor_is_missing_and_left_over(tmp_path) -> None:
    path = write(tmp_path, "FP8") / "rank0.safetensors"
    tensors = load_file(path)
    change(tmp_path, **{f"{FC}.weight": None, f"{FC}.weights": tensors[f"{FC}.weight"]})
    assert f"lacks '{FC}.weight'" in faults_of(tmp_path)
    assert f"contains the unexpected tensor '{FC}.weights'" in faults_of(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"quantization": BLOCKS["FP8"] | {"extra": 1}}, "unknown key 'extra'"),
        ({"quantization": BLOCKS["FP8"] | {"quant_algo": "FP9"}}, "quant_algo='FP9'"),
        ({"quantization": BLOCKS["unsmoothed"] | {"quant_algo": "W4A8_AWQ"}}, "W4A8_AWQ has pre_quant_scale=False"),
        ({"quantization": BLOCKS["FP8"] | {"has_zero_point": True}}, "FP8 has has_zero_point=True"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "NVFP4 has group_size=32"),
        ({"architecture": "QwenForCausalLM"}, "architecture='QwenForCausalLM'"),
        ({"mapping": {"world_size": 2, "tp_size": 1, "pp_size": 1}}, "world_size=2"),
        ({"mapping": {"world_size": 3, "tp_size": 1, "pp_size": 3}}, "pp_size=3 does not divide num_hidden_layers=2"),
        ({"mapping": {"world_size": 3, "tp_size": 3, "pp_size": 1}}, "tp_size=3"),
        ({"mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1}, "intermediate_size": 129}, "intermediate_size=129"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_a_wrong_configuration_is_named(edit, message, tmp_path) -> None:
    write(tmp_path, "FP8")
    raw = json.loads((tmp_path / "config.json").read_text()) | edit
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert message in faults_of(tmp_path)


def test_missing_left_over_and_cut_files_are_named(tmp_path) -> None:
    write(tmp_path, "FP8", tp_size=2)
    (tmp_path / "rank1.safetensors").rename(tmp_path / "rank7.safetensors")
    (tmp_path / "quant_cfg.json").write_text("{}")
    text = faults_of(tmp_path)
    for part in ("rank1.safetensors is missing", "rank7.safetensors is unexpected", "quant_cfg.json is only valid for"):
        assert part in text
    for name in ("rank7.safetensors", "quant_cfg.json"):
        (tmp_path / name).unlink()
    (tmp_path / "rank1.safetensors").write_bytes((tmp_path / "rank0.safetensors").read_bytes()[:-9])
    assert "rank1.safetensors is damaged or truncated" in faults_of(tmp_path)


def test_no_checkpoint_at_all_is_one_fault(tmp_path) -> None:
    assert "has no config.json" in faults_of(tmp_path)


def test_describe_counts_every_byte(tmp_path) -> None:
    """Linears of 2 layers: (64+64)*64 qkv + 64*64 dense + 3*64*128 mlp = 36,864 each, one byte per FP8 weight."""
    facts = describe(write(tmp_path, "FP8"))
    assert facts["bytes_by_part"]["linears"] == 2 * 36864
    assert facts["bytes_by_part"]["embedding and head"] == 2 * 100 * 64 * 2
    assert facts["linears_16bit"] == ["lm_head"]
    assert sum(facts["bytes_by_dtype"].values()) == sum(facts["bytes_by_part"].values())
    assert facts["bits_per_weight"] == pytest.approx(8.0, abs=0.02)
    json.dumps(facts)


def test_the_description_fits_eighty_columns(tmp_path) -> None:
    text = render(describe(write(tmp_path, "W4A16_AWQ")))
    assert "int4_awq, groups of 32" in text
    assert max(map(len, text.splitlines())) <= 80


PROBES = [
    (path.stem, name) for path in sorted(MEASURED.glob("*.json")) for name in json.loads(path.read_text())["runs"]
]
_TORCH_CODES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int8": "I8", "uint8": "U8"}


def test_there_are_measured_exports_of_both_versions() -> None:
    assert {stem for stem, _ in PROBES} == {"modelopt037", "modelopt047"}


def test_measured_exports_obey_the_rules(subtests) -> None:
    """Every export of both ModelOpt versions: same names, dtypes and shapes on every rank."""
    for stem, name in PROBES:
        with subtests.test(f"{stem} {name}"):
            run = json.loads((MEASURED / f"{stem}.json").read_text())["runs"][name]
            config = CheckpointConfig.parse(run["config"])
            headers = [
                {
                    tensor: TensorSpec(_TORCH_CODES[dtype.removeprefix("torch.")], tuple(shape))
                    for tensor, (dtype, shape) in rank.items()
                }
                for _, rank in sorted(run["tensors"].items())
            ]
            assert len(headers) == config.world_size
            for rank, stored in enumerate(headers):
                assert [*tensor_faults("", expected_tensors(config, rank), stored)] == []


def write_mixed(folder: Path, **layers: object) -> Path:
    """Write a checkpoint in which attention is FP8, the MLP of layer 1 is INT4 AWQ, and that of layer 0 is 16 bit."""
    awq = {"quant_algo": "W4A16_AWQ", "group_size": 32, "has_zero_point": False, "pre_quant_scale": True}
    chosen = {f"transformer.layers.{n}.attention.{name}": {"quant_algo": "FP8"} for n in (0, 1) for name in ATTENTION}
    chosen |= {f"transformer.layers.1.mlp.{name}": awq for name in ("fc", "gate", "proj")}
    raw = CONFIG | {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}
    mixed = raw["quantization"] | {"quantized_layers": {**chosen, **layers}}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "quant_cfg.json").write_text(json.dumps(mixed))
    config = CheckpointConfig.load(folder)
    tensors = {n: np.ones(e.shape).astype(DTYPES[e.dtype]) for n, e in expected_tensors(config, 0).items()}
    save_file(tensors, folder / "rank0.safetensors")
    return folder


ATTENTION = ("qkv", "dense")


def test_each_linear_of_a_mix_has_the_tensors_of_its_own_format(tmp_path) -> None:
    """What quant_cfg.json does not name stays in 16 bit, as in TensorRT-LLM's LayerQuantConfig."""
    folder = write_mixed(tmp_path)
    assert verify(folder) == []
    tensors = TensorFile(folder / "rank0.safetensors").header
    found = {name: tensors[f"transformer.layers.{name}.weight"].dtype for name in ("0.mlp.fc", "1.mlp.fc")}
    assert found == {"0.mlp.fc": "BF16", "1.mlp.fc": "I8"}
    assert tensors["transformer.layers.1.attention.qkv.weight"].dtype == "F8_E4M3"
    facts = describe(folder)
    assert (facts["qformat"], facts["quant_algo"], facts["group_size"]) == ("auto", "MIXED_PRECISION", 32)
    assert facts["formats"]["layers.1.mlp.gate"] == "int4_awq"
    assert facts["linears_16bit"] == ["layers.0.mlp.fc", "layers.0.mlp.gate", "layers.0.mlp.proj", "lm_head"]
    assert "linears by format: 4 fp8, 3 int4_awq, 3 none" in render(facts)


def test_a_tensor_of_another_format_is_named(tmp_path) -> None:
    """The checkpoint holds FP8 where quant_cfg.json says INT4."""
    folder = write_mixed(tmp_path)
    change(folder, **{f"{FC}.weight": np.ones((128, 64), ml_dtypes.float8_e4m3fn)})
    assert re.search(rf"'{FC}.weight' is F8_E4M3\[128, 64\]\. Expected: I8\[64, 64\]", faults_of(folder))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({FC: {"quant_algo": "FP9"}}, f"quant_cfg.json has quant_algo='FP9' for {FC}, which is not supported"),
        ({"transformer.layers.7.mlp.fc": {"quant_algo": "FP8"}}, "'transformer.layers.7.mlp.fc', which is no linear"),
        ({FC: {"quant_algo": "FP8", "bits": 3}}, r"quant_cfg.json has the unknown key 'bits'"),
        ({FC: {"quant_algo": "W4A8_AWQ", "pre_quant_scale": False}}, f"{FC} of W4A8_AWQ has pre_quant_scale=False"),
        (
            {FC: {"quant_algo": "W4A16_AWQ", "group_size": 32, "pre_quant_scale": False}},
            f"unexpected tensor '{FC}.prequant_scaling_factor'",
        ),
        ({FC: 8}, f"quant_cfg.json has '{FC}': 8"),
    ],
)
def test_a_wrong_entry_of_quant_cfg_is_named(layers, message, tmp_path) -> None:
    write_mixed(tmp_path)
    mixed = json.loads((tmp_path / "quant_cfg.json").read_text())
    mixed["quantized_layers"] |= layers
    (tmp_path / "quant_cfg.json").write_text(json.dumps(mixed))
    assert re.search(message, faults_of(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has quant_algo=MIXED_PRECISION, but no quant_cfg.json"),
        ("{", "quant_cfg.json is not valid JSON"),
        ('{"quantized_layers": {}}', r"quantized_layers=\{\}.*at least one module"),
    ],
)
def test_a_mix_without_its_layers_is_refused(text, message, tmp_path) -> None:
    write_mixed(tmp_path)
    (tmp_path / "quant_cfg.json").unlink()
    if text is not None:
        (tmp_path / "quant_cfg.json").write_text(text)
    assert re.search(message, faults_of(tmp_path))


def test_the_kv_cache_is_the_same_in_both_files(tmp_path) -> None:
    """TensorRT-LLM takes it from quant_cfg.json, and everything else here from config.json."""
    write_mixed(tmp_path)
    mixed = json.loads((tmp_path / "quant_cfg.json").read_text()) | {"kv_cache_quant_algo": "FP8"}
    (tmp_path / "quant_cfg.json").write_text(json.dumps(mixed))
    assert "quant_cfg.json has kv_cache_quant_algo='FP8', config.json has None" in faults_of(tmp_path)
