"""What an engine folder holds: packed constants, the checkpoint's description, and little more than its bytes."""

import ctypes
import json
import math
import mmap
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import UNIFORM, KvFormat, QFormat
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import HUGE_PAGE, drop_pages, use_huge_pages
from pipelines.engines.port import BuildLimits
from tests.contract.engines.conftest import LIMITS, Workshop

ov = pytest.importorskip("openvino")

PACKED = {
    QFormat.FP8: "f8e4m3",
    QFormat.INT8_SQ: "i8",
    QFormat.INT8_WO: "i8",
    QFormat.INT4_AWQ: "i4",
    QFormat.INT4_WO: "i4",
    QFormat.W4A8_AWQ: "i4",
    QFormat.NVFP4: "f4e2m1",
}

LINEAR_WEIGHTS = 4 * (512 * 256 + 256 * 256 + 3 * 768 * 256)  # tiny Llama: 4 layers of qkv, dense, fc, gate, proj


@pytest.mark.parametrize(("qformat", "element"), PACKED.items())
def test_every_linear_is_packed_in_the_saved_file(qformat: QFormat, element: str, workshop: Workshop) -> None:
    """The file is read back and its constants counted: no linear was widened on the way."""
    folder = workshop.engine(workshop.checkpoint("llama", qformat))
    model = ov.Core().read_model(folder / "openvino_model.xml")
    packed = sum(
        math.prod(node.get_output_shape(0))
        for node in model.get_ops()
        if node.get_type_name() == "Constant" and node.get_output_element_type(0).get_type_name() == element
    )
    assert packed == LINEAR_WEIGHTS


def test_a_file_that_the_disk_does_not_take_is_the_reason(workshop: Workshop, tmp_path: Path) -> None:
    """OpenVINO says "iostream error", and has deleted the file by then; the disk is asked again."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = workshop.checkpoint("llama", QFormat.INT8_WO)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*openvino_model\.bin'"):
            OpenVinoEngine().build(checkpoint, LIMITS, tmp_path, SilentProgress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    ("kind", "qformat"), [("llama", QFormat.NONE), ("gemma", QFormat.NONE), ("llama", QFormat.FP8)]
)
def test_16_bit_weights_stay_16_bit_when_the_graph_is_loaded(kind: str, qformat: QFormat, workshop: Workshop) -> None:
    """The mark is read back by OpenVINO's own reader; FP8 constants have none."""
    folder = workshop.engine(workshop.checkpoint(kind, qformat))
    model = ov.Core().read_model(folder / "openvino_model.xml")
    marked = {}
    for node in model.get_ops():
        source = node.input_value(0).get_node() if node.get_type_name() == "Convert" else None
        if source is not None and source.get_type_name() == "Constant":
            kept = "decompression_0" in node.get_rt_info()
            marked.setdefault(source.get_output_element_type(0).get_type_name(), []).append(kept)
    assert all(marked["bf16"])
    assert len(marked["bf16"]) == (1 if qformat is QFormat.FP8 else 4 * 5 + 1)  # five products, and the head
    assert not any(marked.get("f8e4m3", []))


BUILD = """
import sys
from pathlib import Path
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.port import BuildLimits
limits = BuildLimits(*map(int, sys.argv[3:]))
OpenVinoEngine().build(Path(sys.argv[1]), limits, Path(sys.argv[2]), SilentProgress())
"""


@pytest.mark.parametrize(
    ("kind", "qformat"), [pytest.param("gemma", QFormat.INT4_AWQ, marks=pytest.mark.thorough), ("llama", QFormat.NVFP4)]
)
def test_equal_checkpoints_give_equal_bytes(kind: str, qformat: QFormat, workshop: Workshop, tmp_path: Path) -> None:
    """Whatever was built before in the process: twice here, with others before, and once in a process of its own."""
    checkpoint = workshop.checkpoint(kind, qformat)
    first, second, fresh = tmp_path / "first", tmp_path / "second", tmp_path / "fresh"
    OpenVinoEngine().build(checkpoint, LIMITS, first, SilentProgress())
    OpenVinoEngine().build(checkpoint, LIMITS, second, SilentProgress())
    limits = (LIMITS.max_batch_size, LIMITS.max_input_len, LIMITS.max_seq_len, LIMITS.max_num_tokens)
    subprocess.run([sys.executable, "-c", BUILD, checkpoint, fresh, *map(str, limits)], check=True)
    files = sorted(file.name for file in first.iterdir())
    assert files == ["config.json", "openvino_model.bin", "openvino_model.xml"]
    for name in files:
        assert (second / name).read_bytes() == (first / name).read_bytes(), name
        assert (fresh / name).read_bytes() == (first / name).read_bytes(), name


@pytest.mark.parametrize(
    ("kind", "qformat", "kv"),
    [
        *(("llama", qformat, KvFormat.AUTO) for qformat in UNIFORM),
        ("gemma", QFormat.W4A8_AWQ, KvFormat.AUTO),
        ("gemma", QFormat.NONE, KvFormat.FP8),
    ],
)
def test_every_node_has_a_name_of_its_own(kind: str, qformat: QFormat, kv: KvFormat, workshop: Workshop) -> None:
    """None is numbered by OpenVINO ("Multiply_1042"), which counts what the process made before."""
    model = ov.Core().read_model(workshop.engine(workshop.checkpoint(kind, qformat, kv)) / "openvino_model.xml")
    names = [node.get_friendly_name() for node in model.get_ops()]
    assert [name for name in names if re.fullmatch(r"[A-Za-z]\w*_\d+", name)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", ["gemma", "llama"])
def test_an_int4_engine_is_as_small_as_its_checkpoint(kind: str, workshop: Workshop) -> None:
    checkpoint = workshop.checkpoint(kind, QFormat.INT4_AWQ)
    weights = (workshop.engine(checkpoint) / "openvino_model.bin").stat().st_size
    whole = sum(file.stat().st_size for file in workshop.engine(checkpoint).iterdir())
    assert weights <= 1.02 * (checkpoint / "rank0.safetensors").stat().st_size
    assert whole <= 1.15 * sum(file.stat().st_size for file in checkpoint.iterdir())


def test_the_description_is_trtllms(workshop: Workshop) -> None:
    """config.json has the three parts of a TensorRT-LLM engine, and what is OpenVINO's under `engine`."""
    checkpoint = workshop.checkpoint("llama", QFormat.FP8)
    config = json.loads((workshop.engine(checkpoint) / "config.json").read_text())
    assert config["pretrained_config"] == json.loads((checkpoint / "config.json").read_text())
    assert config["build_config"]["max_seq_len"] == LIMITS.max_seq_len
    assert config["build_config"]["kv_cache_type"] == "PAGED"
    assert config["engine"]["flavour"] == "openvino"
    assert config["engine"]["weight_elements"]["f8e4m3"] == LINEAR_WEIGHTS


def test_facts_name_the_size(workshop: Workshop, tmp_path: Path) -> None:
    facts = OpenVinoEngine().build(workshop.checkpoint("llama", QFormat.FP8), LIMITS, tmp_path, SilentProgress())
    assert facts.engine_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "Gemma2ForCausalLM"}, "Gemma2ForCausalLM is not supported by engine=openvino"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"qk_layernorm": True}, "qk_layernorm=True"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ({"rotary_scaling": {"rope_type": "longrope"}}, "rotary_scaling of type 'longrope'"),
        ({"quantization": {"quant_algo": "W4A16_GPTQ"}}, "quant_algo='W4A16_GPTQ'"),
        ({"quantization": {"quant_algo": "FP8"}}, "BF16, but FP8 stores F8_E4M3"),
    ],
)
def test_models_that_are_not_built_are_named(
    change: dict[str, object], message: str, workshop: Workshop, tmp_path: Path
) -> None:
    source = workshop.checkpoint("llama", QFormat.NONE)
    checkpoint = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    config = json.loads((source / "config.json").read_text()) | change
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        OpenVinoEngine().build(checkpoint, LIMITS, tmp_path / "engine", SilentProgress())


def test_a_cut_off_checkpoint_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(workshop.checkpoint("llama", QFormat.FP8), tmp_path / "checkpoint"))
    file = checkpoint / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"rank0\.safetensors is damaged or truncated"):
        OpenVinoEngine().build(checkpoint, LIMITS, tmp_path / "engine", SilentProgress())


def test_a_scale_that_is_no_number_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    """NaN in one activation scale must not become an engine."""
    from safetensors.numpy import load_file, save_file

    checkpoint = Path(shutil.copytree(workshop.checkpoint("llama", QFormat.INT8_SQ), tmp_path / "checkpoint"))
    file, name = checkpoint / "rank0.safetensors", "transformer.layers.1.mlp.proj.activation_scaling_factor"
    tensors = load_file(file)
    save_file(tensors | {name: np.array([np.nan], dtype=np.float32)}, file)
    with pytest.raises(UserError, match=rf"'{name}' is \[nan\]"):
        OpenVinoEngine().build(checkpoint, LIMITS, tmp_path / "engine", SilentProgress())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (BuildLimits(1, 8, 4096, 64), "max_seq_len=4096 is more than the model's 2048 positions"),
        (BuildLimits(1, 64, 32, 64), "max_input_len=64 is more than max_seq_len=32"),
    ],
)
def test_limits_nothing_could_honour_are_refused(
    limits: BuildLimits, message: str, workshop: Workshop, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        OpenVinoEngine().build(workshop.checkpoint("llama", QFormat.NONE), limits, tmp_path, SilentProgress())


def test_a_folder_that_is_no_engine_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not an OpenVINO engine"):
        OpenVinoEngine().open(tmp_path)


def test_an_engine_of_another_flavour_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(workshop.engine(workshop.checkpoint("llama", QFormat.NONE)), tmp_path / "engine"))
    config = json.loads((engine / "config.json").read_text()) | {"engine": {"flavour": "tensorrt_llm"}}
    (engine / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="built with engine=tensorrt_llm, not with engine=openvino"):
        OpenVinoEngine().open(engine)


def test_pages_of_the_weights_file_leave_memory_and_come_back(tmp_path: Path) -> None:
    """Only those of mappings that cannot be written to: a changed page of another is kept."""
    file = tmp_path / "weights.bin"
    file.write_bytes(b"w" * 2**20)
    with file.open("r+b") as handle:
        read = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        written = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        written[:4] = b"mine"
        assert read[:: mmap.PAGESIZE] == b"w" * 256
        before = resident(file)
        assert drop_pages(file) == 2**20
        assert resident(file) <= before - 2**20
        assert (read[5], written[:4]) == (ord("w"), b"mine")
        written.close()
        read.close()


def test_huge_pages_hold_what_is_resident_and_nothing_else() -> None:
    """A mapping of 4 huge pages of which 2 are written and 1 is partly written; no page more becomes resident."""
    with mmap.mmap(-1, 5 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = -address % HUGE_PAGE
        written = slice(first, first + 2 * HUGE_PAGE)
        memory[written] = b"w" * (2 * HUGE_PAGE)
        memory[first + 3 * HUGE_PAGE] = 1
        before = of_mapping(address, "Rss")
        gathered = use_huge_pages()
        huge = of_mapping(address, "AnonHugePages")
        assert (huge, gathered >= huge) in ((2 * HUGE_PAGE, True), (0, True))  # 0 where the kernel has none to give
        assert of_mapping(address, "Rss") == before
        assert memory[written] == b"w" * (2 * HUGE_PAGE)


def of_mapping(address: int, entry: str) -> int:
    """Return an entry of /proc/self/smaps, bytes, of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            start, stop = (int(each, 16) for each in name.split("-"))
            inside = start <= address < stop
        elif inside and name == f"{entry}:":
            return int(values[0]) * 1024
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.FP8])
def test_a_loaded_engine_holds_its_own_weights_alone(qformat: QFormat, workshop: Workshop) -> None:
    """The plugin multiplies its packed copies; what it read of the file to make them is dropped."""
    folder = workshop.engine(workshop.checkpoint("llama", qformat))
    file = folder / "openvino_model.bin"
    with OpenVinoEngine().open(folder) as session:
        session.loglikelihood([([2, 3], [4])], SilentProgress())
        forcing = session.teacher_forcing()
        list(forcing.logits(forcing.hidden([[2, 3, 4]], 3), 3))
        assert drop_pages(file) > 0
        session.loglikelihood([([2, 3, 4], [5])], SilentProgress())
        assert resident(file) < file.stat().st_size / 4


def resident(file: Path) -> int:
    """Resident bytes of all mappings of a file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line and "-" in line.split()[0]:
            inside = line.endswith(str(file.resolve()))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total
