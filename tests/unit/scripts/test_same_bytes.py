"""scripts/same_bytes.py: what counts as the same, and what a difference looks like."""

import json
import struct
from pathlib import Path

import pytest

from scripts.records.cases import GROUPS, all_cases
from scripts.records.documents import Document, Kind, Neutral, commands_in, file_documents, numbers_in
from scripts.records.outputs import READERS
from scripts.records.recording import Recording
from scripts.same_bytes import main

TENSORS = {"layer.weight": "F16 [2, 2] aa", "layer.bias": "F16 [2] bb"}
NUMBERS = {"options[0].rate": 17.5, "options[0].gpus": 4, "options[1].rate": 29.0, "options[1].gpus": 6}
NEUTRAL = Neutral({"/scratch": "<scratch>"})


@pytest.fixture
def write(tmp_path):
    """Writes a recording with a checkpoint and an answer, or with other cases."""

    def write(name, tensors=TENSORS, numbers=NUMBERS, whole="cc", **cases):
        exact = Document(Kind.EXACT, tensors).to_json()
        documents = {"rank0": exact, "rank0 (whole)": Document(Kind.WHOLE, {"sha256": whole}).to_json()}
        cases = cases or {
            "checkpoints/tiny": {"words": ["build"], "seconds": 1.0, "documents": documents},
            "numbers/size": {
                "words": ["size"],
                "seconds": 1.0,
                "documents": {"answer.json": Document(Kind.NUMBERS, numbers).to_json()},
            },
        }
        path = tmp_path / f"{name}.json"
        Recording("0" * 40, {"torch": "2.9"}, cases).save(path)
        return str(path)

    return write


def test_recordings_of_the_same_output_are_equal(write, capsys):
    assert main(["compare", write("a"), write("b")]) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")


def test_a_differing_tensor_is_named_with_both_values(write, capsys):
    other = write("b", tensors={**TENSORS, "layer.bias": "F16 [2] dd"})
    assert main(["compare", write("a"), other]) == 1
    said = capsys.readouterr().out
    assert "rank0: layer.bias: F16 [2] bb -> F16 [2] dd" in said
    assert "layer.weight" not in said
    assert "different: 1 of 2 cases" in said


def test_a_missing_tensor_is_a_difference(write, capsys):
    assert main(["compare", write("a"), write("b", tensors={"layer.weight": TENSORS["layer.weight"]})]) == 1
    assert "rank0: layer.bias: only before: F16 [2] bb" in capsys.readouterr().out


def test_a_renamed_key_of_numbers_with_the_same_values_is_reported_and_equal(write, capsys):
    renamed = {name.replace("rate", "requests_per_s"): value for name, value in NUMBERS.items()}
    assert main(["compare", write("a"), write("b", numbers=renamed)]) == 0
    said = capsys.readouterr().out
    assert "renamed keys, same values: answer.json: options[].rate -> answer.json: options[].requests_per_s" in said


def test_a_renamed_key_with_another_value_is_a_difference(write, capsys):
    renamed = {name.replace("rate", "requests_per_s"): value for name, value in NUMBERS.items()}
    assert main(["compare", write("a"), write("b", numbers={**renamed, "options[1].requests_per_s": 29.5})]) == 1
    assert "options[1].requests_per_s: only after: 29.5" in capsys.readouterr().out


def test_a_renamed_tensor_is_a_difference(write):
    renamed = {name.replace("layer", "block"): value for name, value in TENSORS.items()}
    assert main(["compare", write("a"), write("b", tensors=renamed)]) == 1


def test_a_changed_number_is_shown_with_its_change(write, capsys):
    assert main(["compare", write("a"), write("b", numbers={**NUMBERS, "options[1].gpus": 9})]) == 1
    assert "options[1].gpus: 6 -> 9 (+50 %)" in capsys.readouterr().out


def test_rounding_is_a_difference_unless_it_is_allowed_and_never_of_a_tensor(write, capsys):
    before, after = write("a"), write("b", numbers={**NUMBERS, "options[0].rate": 17.500000000000004})
    assert main(["compare", before, after]) == 1
    assert main(["compare", before, after, "--rounding", "1e-9"]) == 0
    assert "numbers that differ by rounding alone: 1, by at most 2e-14 %" in capsys.readouterr().out
    scales = write("c", tensors={**TENSORS, "scale": 1.0}), write("d", tensors={**TENSORS, "scale": 1.0000000001})
    assert main(["compare", *scales, "--rounding", "1e-9"]) == 1


def test_of_a_long_command_the_changed_words_are_shown(write, capsys):
    same = " ".join(f"--option_{number} {number}" for number in range(20))
    before, after = (
        write("a", tensors={"command": f"build --tp 1 {same}"}),
        write("b", tensors={"command": f"build {same}"}),
    )
    assert main(["compare", before, after]) == 1
    assert "rank0: command: --tp 1 -> nothing\n" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--xml"], 1)])
def test_whole_files_are_judged_on_request(write, capsys, words, code):
    assert main(["compare", write("a"), write("b", whole="ee"), *words]) == code
    assert "rank0 (whole)" in capsys.readouterr().out or not words


def test_python_files_follow_the_modules_and_are_no_difference(write, tmp_path, capsys):
    names = ["a", "b"]
    for name in names:
        (tmp_path / "model.py").write_text(f"import {name}\n")
        found = file_documents(tmp_path / "model.py", "repository/model.py", NEUTRAL)
        documents = {file: document.to_json() for file, document in found.items()}
        write(name, **{"repositories/default": {"words": [], "seconds": 1.0, "documents": documents}})
    assert main(["compare", *(str(tmp_path / f"{name}.json") for name in names)]) == 0
    assert "Python files and prose that differ (not judged): model.py" in capsys.readouterr().out


def test_a_case_that_was_not_recorded_is_a_difference(write, capsys):
    alone = {"numbers/size": json.loads(Path(write("a")).read_text())["cases"]["numbers/size"]}
    assert main(["compare", write("a"), write("b", **alone)]) == 1
    assert "checkpoints/tiny: 1 difference\n  case: recorded: yes -> no\n" in capsys.readouterr().out
    assert main(["compare", write("a"), write("b", **alone), "--only", "numbers"]) == 0


def test_nothing_to_compare_is_not_equal(write, capsys):
    assert main(["compare", write("a"), write("b"), "--only", "engines"]) == 2
    assert "contain no cases of engines" in capsys.readouterr().err


def test_a_recording_that_is_missing_says_how_to_make_it(write, tmp_path, capsys):
    missing = tmp_path / "missing.json"
    assert main(["compare", write("a"), str(missing)]) == 2
    assert f"The recording {missing} does not exist. Make it: " in capsys.readouterr().err


def test_a_commit_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["record", "--commit", "no-such-commit", "--out", str(tmp_path / "a.json")]) == 2
    assert "'no-such-commit' is not a commit of " in capsys.readouterr().err


def test_a_recording_of_another_commit_is_not_continued(write, capsys):
    path = write("a")
    assert main(["record", "--commit", "HEAD", "--out", path]) == 2
    assert f"{path} is of commit 000000000000, not of " in capsys.readouterr().err


def test_other_versions_are_named_beside_the_result(write, tmp_path, capsys):
    other = json.loads(Path(write("a")).read_text())
    other["environment"]["torch"] = "2.8"
    (tmp_path / "b.json").write_text(json.dumps(other))
    assert main(["compare", write("a"), str(tmp_path / "b.json")]) == 0
    assert "recorded with different versions, which may explain a difference: torch 2.9 and 2.8" in (
        capsys.readouterr().out
    )


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
        return file_documents(safetensors(tmp_path / "rank0.safetensors", **tensors), "rank0", NEUTRAL)["rank0"].rows

    first = rows(a=[1.0, 2.0], b=[3.0])
    assert first["a"].startswith("F32 [2] ")
    assert rows(b=[3.0], a=[1.0, 2.0]) == first
    assert rows(a=[1.0, 2.0000002], b=[3.0])["a"] != first["a"]


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "rank0.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"rank0\.safetensors is not a safetensors file"):
        file_documents(tmp_path / "rank0.safetensors", "rank0", NEUTRAL)


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
    return file_documents(folder / "model.xml", "model.xml", NEUTRAL)["model.xml"].rows


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
    rows = file_documents(path, "run.sh", NEUTRAL)["run.sh"].rows
    assert rows["text"] == "#!/bin/bash\ncd <scratch>/case\necho <message>\nln -s fp8-<key> x"


def test_json_is_compared_without_versions_and_sentences(tmp_path):
    path = tmp_path / "repository.json"
    path.write_text(
        json.dumps({"engine_version": "1.2", "needs": "It needs a GPU here.", "start": "a b c d --e", "tp": [1, 2]})
    )
    rows = file_documents(path, "repository.json", NEUTRAL)["repository.json"].rows
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
