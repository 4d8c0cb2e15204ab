"""engine=tensorrt_edge without Edge-LLM: its environment, its commands, and what reading a graph back finds."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SILENT
from pipelines.engines.tensorrt_edge.exporter import VERSION, environment_fault, export
from pipelines.engines.tensorrt_edge.read_back import fragments_to_int4, nibbles_to_int4, read_back
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.plan.plan import make_plan
from pipelines.run.gpu_commands import gpu_commands
from pipelines.settings.compose import load
from pipelines.stages.unified import ExportEdge, device_commands
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE

FRAGMENTS = "0baf69ba"
"""Of SHA-256 of what `repack_to_cutedsl_fragment` of tensorrt-edgellm 0.11.0 returns for `codes(192, 128) + 8`."""


def environment(folder: Path, version: str = VERSION, program: str = "exit 0") -> Path:
    """An environment whose Python is a script of the shell."""
    (folder / "lib/python3.11/site-packages" / f"tensorrt_edgellm-{version}.dist-info").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "bin/python").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("version", "said"), [(None, "is no environment of TensorRT Edge-LLM"), ("0.10.1", "has tensorrt-edgellm 0.10.1")]
)
def test_another_environment_is_named_with_the_way(version: str | None, said: str, tmp_path: Path) -> None:
    place = environment(tmp_path / "edge", version) if version else tmp_path / "edge"
    fault = environment_fault(place)
    assert fault is not None
    assert said in str(fault)
    assert str(fault).endswith("Run: make setup-edge")
    assert environment_fault(environment(tmp_path / "right")) is None


def test_a_failing_exporter_is_quoted(tmp_path: Path) -> None:
    place = environment(tmp_path / "edge", program="echo 'loading'; echo 'ValueError: no chat template'; exit 1")
    with pytest.raises(UserError, match=r"tensorrt-edgellm-export failed \(.*\): ValueError: no chat template"):
        export(tmp_path, tmp_path / "out", place, SILENT)


def test_success_without_a_graph_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensorrt-edgellm-export failed"):
        export(tmp_path, tmp_path / "out", environment(tmp_path / "edge"), SILENT)


def test_the_exporter_sees_neither_this_environment_nor_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    place = environment(tmp_path / "edge", program="env; exit 1")
    with pytest.raises(UserError):
        export(tmp_path, tmp_path / "out", place, SILENT)
    seen = dict(line.split("=", 1) for line in (tmp_path / "out/export.log").read_text().splitlines() if "=" in line)
    assert "PYTHONPATH" not in seen
    assert (seen["HF_HUB_OFFLINE"], seen["CUDA_VISIBLE_DEVICES"], seen["HOME"]) == ("1", "", os.environ["HOME"])


@pytest.mark.parametrize(
    ("given", "positions", "limits"),
    [
        ({}, None, (1, 4096, 8192)),
        ({}, 2048, (1, 2048, 2048)),
        ({"max_batch_size": 4, "max_input_len": 512, "max_seq_len": 16384}, 2048, (4, 512, 16384)),
    ],
)
def test_limits_are_what_is_given_and_else_those_of_the_server(given, positions, limits) -> None:
    graph, *_, served = device_commands(BuildSettings(**given), positions).values()
    batch, prompt, total = limits
    assert graph == (
        f"llm_build --onnxDir llm --engineDir engine --maxBatchSize {batch} --maxInputLen {prompt} "
        f"--maxKVCacheCapacity {total}"
    )
    assert served == (
        f"tensorrt-edgellm-serve checkpoint --host 127.0.0.1 --max-batch-size {batch} --max-input-len {prompt} "
        f"--max-kv-cache-capacity {total}"
    )


def test_the_server_on_the_device_gets_the_address_that_is_given(tmp_path: Path) -> None:
    words = ["engine=tensorrt_edge", "model=tiny_llama", "quant=none", "hardware=a10", "serving.host=0.0.0.0"]
    made = make_plan(load([*words, "serving.openai_port=9100"]), "build", Store(tmp_path), MACHINE)
    (served,) = [line for line in gpu_commands(made, words) if "tensorrt-edgellm-serve" in line]
    assert "tensorrt-edgellm-serve checkpoint --host 0.0.0.0 --port 9100" in served
    with pytest.raises(UserError, match=r"serving\.api_key=true has no effect on engine=tensorrt_edge"):
        make_plan(load([*words, "serving.api_key=true"]), "build", Store(tmp_path), MACHINE)


def test_limits_are_not_of_the_graph() -> None:
    """Another limit takes the same artifact; another exporter does not."""
    assert ExportEdge(Path("/x")).identity() == {"engine": "tensorrt_edge", "tensorrt-edgellm": VERSION}


# Reading back.


def codes(out: int, width: int) -> np.ndarray:
    return ((np.arange(out)[:, None] * 7 + np.arange(width) * 3 + np.arange(width) // 16) % 16 - 8).astype(np.int8)


def fragments(values: np.ndarray) -> np.ndarray:
    """Pack codes as Edge-LLM does, a nibble at a time."""
    out, width = values.shape
    outs, tiles = -(-out // 128), width // 64
    words = np.full((outs, tiles, 4, 2, 128), 0x88888888, np.uint32)
    for n in range(out):
        for k in range(width):
            thread = n % 32 * 4 + k % 8 // 2
            nibble = 4 * (k % 2) + 2 * (n % 64 // 32) + k % 16 // 8
            place = (n // 128, k // 64, k % 64 // 16, n % 128 // 64, thread)
            clear = words[place] & ~np.uint32(15 << (4 * nibble))
            words[place] = clear | np.uint32((int(values[n, k]) + 8) << (4 * nibble))
    return words.reshape(-1, 128).view(np.int8)


def test_int4_is_read_as_edge_llm_packs_it() -> None:
    """192 outputs are a block and a half; the rest of the second is zeros."""
    packed = fragments(codes(192, 128))
    assert hashlib.sha256(packed.tobytes()).hexdigest().startswith(FRAGMENTS)
    np.testing.assert_array_equal(fragments_to_int4(packed, 192, 128), codes(192, 128))


def test_int4_of_modelopt_has_two_outputs_in_a_byte() -> None:
    values = codes(8, 4)
    np.testing.assert_array_equal(nibbles_to_int4((values[0::2] & 15 | values[1::2] << 4).view(np.uint8)), values)


class Exported:
    """A checkpoint of one layer, and a graph of it."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder
        attention = "model.layers.0.self_attn"
        rows = {"q": 8, "k": 4, "v": 4}
        linears = {f"{attention}.{x}_proj.weight": rng.normal(size=(n, 16)).astype(bfloat16) for x, n in rows.items()}
        down = "model.layers.0.mlp.down_proj"
        self.checkpoint: dict[str, Any] = {
            "model.embed_tokens.weight": rng.normal(size=(32, 16)).astype(bfloat16),
            **linears,
            f"{down}.weight": rng.integers(-127, 127, (16, 32)).astype(np.int8),
            f"{down}.weight_scale": rng.uniform(0.01, 0.1, 16).astype(np.float32),
            f"{down}.input_scale": np.array(0.03125, np.float32),
        }
        joined = np.concatenate([linears[name] for name in linears])
        self.graph: dict[str, np.ndarray] = {
            "val_1": np.ascontiguousarray(joined.T).astype(np.float16),
            f"_model.{down}.weight": self.checkpoint[f"{down}.weight"],
            f"_model.{down}.weight_scale": self.checkpoint[f"{down}.weight_scale"],
            "shared_with_others": self.checkpoint[f"{down}.input_scale"],
            "shape": np.array([-1, 16]),
        }
        self.embedding = self.checkpoint["model.embed_tokens.weight"].astype(np.float16)
        self.nodes: list[dict[str, Any]] = []

    def faults(self) -> list[str]:
        """Write all of it, and read it back."""
        types = {"float16": "FLOAT16", "float32": "FLOAT", "int8": "INT8", "int64": "INT64"}
        listed, data = {}, b""
        for name, array in self.graph.items():
            entry = {"type": types[array.dtype.name], "shape": list(array.shape)}
            if array.ndim:
                listed[name], data = {**entry, "at": [len(data), array.nbytes]}, data + array.tobytes()
            else:
                listed[name] = {**entry, "hex": array.tobytes().hex()}
        (self.folder / "model.onnx.data").write_bytes(data)
        save_file({"embedding": self.embedding}, self.folder / "embedding.safetensors")
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        (self.folder / "config.json").write_text(json.dumps(sizes))
        save_file(self.checkpoint, self.folder / "model.safetensors")
        listing = {"initializers": listed, "nodes": self.nodes}
        return [
            str(fault) for fault in read_back([TensorFile(self.folder / "model.safetensors")], listing, self.folder)
        ]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    return Exported(tmp_path)


def test_joined_transposed_and_shared_arrays_are_found(exported: Exported) -> None:
    assert exported.faults() == []


@pytest.mark.parametrize(("leaf", "rows"), [("self_attn.qkv_proj", (8, 4, 4)), ("mlp.gate_up_proj", (8, 8))])
def test_joined_linears_may_be_apart_in_the_graph(leaf: str, rows: tuple[int, ...], exported: Exported) -> None:
    joined = np.random.default_rng(1).normal(size=(16, 16)).astype(bfloat16)
    exported.checkpoint[f"model.layers.0.{leaf}.weight"] = joined
    pieces = np.split(joined.astype(np.float16), np.cumsum(rows)[:-1])
    exported.graph |= {f"piece_{number}": np.ascontiguousarray(piece.T) for number, piece in enumerate(pieces)}
    assert exported.faults() == []
    del exported.graph["piece_1"]
    lacks, adds = exported.faults()
    assert f"lacks 1 of the checkpoint's 8 tensors: model.layers.0.{leaf}.weight" in lacks
    assert "piece_0" in adds


def test_a_tensor_that_is_left_out_is_named(exported: Exported) -> None:
    del exported.graph["shared_with_others"]
    (fault,) = exported.faults()
    assert fault.startswith(
        "TensorRT Edge-LLM's graph lacks 1 of the checkpoint's 7 tensors: model.layers.0.mlp.down_proj.input"
    )


def test_a_changed_value_is_a_missing_tensor(exported: Exported) -> None:
    exported.graph["val_1"][3, 9] += 1  # a column of k
    (fault,) = exported.faults()
    assert "lacks 1 of the checkpoint's 7 tensors: model.layers.0.self_attn.k_proj.weight" in fault


def test_another_embedding_is_found(exported: Exported) -> None:
    exported.embedding = exported.embedding * np.float16(2)
    assert "model.embed_tokens.weight" in exported.faults()[0]


def test_an_array_that_is_not_of_the_checkpoint_is_named_but_ones_are_not(exported: Exported) -> None:
    exported.graph["pre_quant_scale"] = np.ones(16, np.float16)
    assert exported.faults() == []
    exported.graph["qweight"] = np.zeros((4, 4), np.int8)
    assert "adds 1 arrays: qweight" in exported.faults()[0]


@pytest.mark.parametrize(("value", "said"), [(7e4, "has 70144"), (-7e4, "has -70144")])
def test_what_fp16_cannot_hold_is_refused(value: float, said: str, exported: Exported) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    exported.checkpoint[name][0, 0] = value
    with np.errstate(over="ignore"):
        exported.graph["val_1"][0, 8] = np.float16(exported.checkpoint[name][0, 0])
    (fault,) = exported.faults()
    assert f"'{name}' {said}, which FP16 cannot hold" in fault


def test_a_scale_whose_bits_fp16_loses_is_refused(exported: Exported) -> None:
    """1e-7 becomes 1.19e-7; the same in float32 is no fault."""
    name = "model.layers.0.mlp.down_proj.weight_scale"
    exported.checkpoint[name][2] = 1e-7
    exported.graph[f"_model.{name}"] = exported.checkpoint[name]
    assert exported.faults() == []
    exported.graph[f"_model.{name}"] = exported.checkpoint[name].astype(np.float16)
    (fault,) = exported.faults()
    assert "has 1e-07, which FP16 cannot hold" in fault


def test_scales_of_the_kv_cache_are_in_the_attention(exported: Exported) -> None:
    for kv, scale in (("k", 0.5), ("v", 0.25)):
        exported.checkpoint[f"model.layers.0.self_attn.{kv}_proj.{kv}_scale"] = np.array(scale, np.float32)
    own = {"qkv_scales": [1.0, 0.5, 0.25], "enable_fp8_kv_cache": 1}
    exported.nodes = [{"op": "AttentionPlugin", "attributes": own, "inputs": []}]
    assert exported.faults() == []
    exported.nodes[0]["attributes"] = {"qkv_scales": [1.0, 1.0, 1.0], "enable_fp8_kv_cache": 0}
    assert "lacks 2 of the checkpoint's 9 tensors" in exported.faults()[0]
