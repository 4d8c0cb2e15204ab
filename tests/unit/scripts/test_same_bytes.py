"""scripts/same_bytes.py: what counts as the same, and what a difference looks like."""

import json
import struct
from dataclasses import replace

import pytest

from scripts.records.cases import GROUPS, all_cases
from scripts.records.checkout import RecordingError
from scripts.records.documents import Neutral, commands_in, file_rows, numbers_in
from scripts.records.outputs import READERS
from scripts.same_bytes import ENVIRONMENT, compare, is_recorded, main, save

TENSORS = {"layer.weight": "F16 [2, 2] aa", "layer.bias": "F16 [2] bb"}
NEUTRAL = Neutral({"/scratch": "<scratch>"})
CASE = next(case for case in all_cases() if case.groups == ("numbers",))


@pytest.fixture
def write(tmp_path):
    """Writes a recording of one case."""

    def write(name, rows=TENSORS, versions=None):
        out = tmp_path / name
        save(CASE, {"numbers": {"folder/rank0": rows}}, out)
        (out / ENVIRONMENT).write_text(json.dumps(versions or {"torch": "2.9"}))
        return out

    return write


def test_recordings_of_the_same_output_are_equal_in_any_order(write, capfd):
    assert compare(write("a"), write("b", dict(reversed(TENSORS.items()))), ["numbers"])
    assert capfd.readouterr().out == "numbers         1 cases  equal\n"
    assert compare(write("a", {"gpus": 1}), write("b", {"gpus": 1.0}), ["numbers"])


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ({**TENSORS, "layer.bias": "F16 [2] dd"}, "layer.bias: F16 [2] [-bb-]{+dd+}"),
        ({"layer.weight": TENSORS["layer.weight"]}, "[-layer.bias: F16 [2] bb-]"),
        ({**TENSORS, "text": "cd /here\n--tp 1"}, "{+text: --tp 1+}"),
        ({**TENSORS, "rate": 17.500000000000004}, "{+rate: 17.500000000000004+}"),
    ],
)
def test_a_difference_is_shown_by_document_and_row(write, capfd, rows, line):
    assert not compare(write("a"), write("b", rows), ["numbers"])
    said = capfd.readouterr().out
    assert line in said
    assert f"{CASE.name}/folder/rank0" in said
    assert "-layer.weight" not in said
    assert "numbers         1 cases  different\n" in said


def test_nothing_to_compare_is_not_equal(write):
    with pytest.raises(RecordingError, match="contain no cases of engines"):
        compare(write("a"), write("b"), ["engines"])


def test_other_versions_are_named_beside_the_result(write, capfd):
    assert compare(write("a"), write("b", versions={"torch": "2.8"}), ["numbers"])
    said = capfd.readouterr().out
    assert "different versions, which may explain a difference" in said
    assert "2.8" in said


def test_a_case_is_recorded_once_for_its_words(write):
    out = write("a")
    assert is_recorded(CASE, out)
    assert not is_recorded(replace(CASE, commands=(("plan",),)), out)


def test_a_commit_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["no-such-commit", "HEAD", "--folder", str(tmp_path)]) == 2
    assert "'no-such-commit' is not a commit of " in capsys.readouterr().err


def safetensors(path, **tensors):
    """A file of float32 vectors."""
    header, data = {}, b""
    for name, values in tensors.items():
        content = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_tensors_are_equal_in_any_order_and_differ_by_one_bit(tmp_path):
    def rows(**tensors):
        return file_rows(safetensors(tmp_path / "rank0.safetensors", **tensors), NEUTRAL)

    first = rows(a=[1.0, 2.0], b=[3.0])
    assert first["a"].startswith("F32 [2] ")
    assert rows(b=[3.0], a=[1.0, 2.0]) == first
    assert rows(a=[1.0, 2.0000002], b=[3.0])["a"] != first["a"]


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "rank0.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"rank0\.safetensors is not a safetensors file"):
        file_rows(tmp_path / "rank0.safetensors", NEUTRAL)


LAYERS = """<layer id="{one}" name="x" type="Parameter" version="opset1"><data shape="1" element_type="f32"/>
<output><port id="0" precision="FP32" names="x"><dim>1</dim></port></output></layer>
<layer id="{two}" name="{name}" type="Const" version="opset1">
<data element_type="f32" shape="1" offset="{offset}" size="4"/>
<output><port id="0" precision="FP32"><dim>1</dim></port></output></layer>
<layer id="{three}" name="{name}_2" type="{kind}" version="opset1">
<output><port id="2" precision="FP32"><dim>1</dim></port></output></layer>"""
EDGES = """<edge from-layer="{one}" from-port="0" to-layer="{three}" to-port="0"/>
<edge from-layer="{two}" from-port="0" to-layer="{three}" to-port="1"/>"""


def graph(folder, weights, *, name="Constant_1", offset=0, kind="Multiply", ids=(0, 1, 2), swap=False):
    """Rows of x times a constant, or the constant times x."""
    one, two, three = ids
    values = {"one": one, "two": two, "three": three, "name": name, "offset": offset, "kind": kind}
    edges = EDGES.format(**(values | {"one": two, "two": one} if swap else values))
    text = f"<net><layers>{LAYERS.format(**values)}</layers><edges>{edges}</edges></net>"
    (folder / "model.xml").write_text(text)
    (folder / "model.bin").write_bytes(weights)
    return file_rows(folder / "model.xml", NEUTRAL)


def test_an_engine_is_the_same_whatever_its_nodes_are_called_and_where_its_constants_lie(tmp_path):
    first = graph(tmp_path, b"abcd")
    assert graph(tmp_path, b"....abcd", name="scale", offset=4, ids=(7, 3, 5)) == first
    assert first["operation Multiply"] == 1
    assert sum(name.startswith("constant f32 [1] ") for name in first) == 1


@pytest.mark.parametrize("change", [{"weights": b"abce"}, {"kind": "Subtract"}, {"swap": True}])
def test_an_engine_differs_by_a_constant_an_operation_or_its_wiring(tmp_path, change):
    first = graph(tmp_path, b"abcd")
    assert graph(tmp_path, **{"weights": b"abcd", **change})["graph"] != first["graph"]


def test_texts_are_compared_without_comments_keys_versions_and_paths(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("#!/bin/bash\n# Starts it.\ncd /scratch/case  # here\necho Ready.\nln -s fp8-0123456789abcdef x\n")
    rows = file_rows(path, NEUTRAL)
    assert rows["text"] == "#!/bin/bash\ncd <scratch>/case\necho <message>\nln -s fp8-<key> x"


def test_json_is_compared_without_versions_and_sentences(tmp_path):
    path = tmp_path / "repository.json"
    path.write_text(
        json.dumps({"engine_version": "1.2", "needs": "It needs a GPU here.", "start": "a b c d --e", "tp": [1, 2]})
    )
    rows = file_rows(path, NEUTRAL)
    assert rows == {
        "engine_version": "<version>",
        "needs": "<prose>",
        "start": "a b c d --e",
        "tp[0]": 1,
        "tp[1]": 2,
    }


def test_numbers_of_a_text_are_those_that_stand_alone():
    text = "h100_sxm int4_awq: 3,003,814 tokens, TTFT 51.8 ms (max_seq_len=8,192), -20 %, 1e-06, 4.7.\n1.2.1 2-18"
    assert numbers_in(text) == [3003814, 51.8, 8192, -20, 1e-06, 4.7]


def test_commands_of_a_plan_are_lines_with_options():
    text = "9 stages -- to run.\n  build\n    trtllm-build \\\n      --max_batch_size 8 \\\n      --lora disable\n"
    assert list(commands_in(text)) == ["trtllm-build --max_batch_size 8 --lora disable"]


def test_cases_have_names_of_their_own_and_known_groups_and_readers():
    names = [f"{group}/{case.name}" for case in all_cases() for group in case.groups]
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == set(GROUPS)
    assert all(case.reads_plan or case.outputs for case in all_cases())
    assert {reader for case in all_cases() for reader in case.outputs} <= set(READERS)
