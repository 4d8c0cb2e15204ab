"""`make migrate`: public deployments of TensorRT engines in the words of the LLM API, and what it refuses."""

import json
import re
import time
from functools import reduce
from pathlib import Path

import pytest
import yaml

from pipelines.cli.main import main
from pipelines.deploy.migrate.migrate_command import migrate
from pipelines.deploy.migrate.sources import TEMPLATE, WORDS, OldDeployment, read_old
from pipelines.domain.errors import UserError
from pipelines.domain.formats import BY_QUANT_ALGO
from pipelines.engines.tensorrt_llm.config import OPTIONS
from pipelines.engines.tensorrt_llm.llm_api import complaints, tables
from pipelines.store.manifest import MANIFEST, sealed
from tests.conftest import ROOT
from tests.support.engine_folders import engine_config, write_engine
from triton_repo.generate import parse, to_text

PUBLIC = json.loads((ROOT / "tests/reference/deployments_1_2.json").read_text(encoding="utf-8"))["deployments"]


def write_repository(folder: Path, given: dict, name: str = "tensorrt_llm") -> Path:
    kind, _, other = given["backend"].rpartition(":")
    config = parse(f'{kind or "backend"}: "{other}" max_batch_size: {given["max_batch_size"]}')
    for key, value in given["parameters"].items():
        config.parameters[key].string_value = value
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(to_text(config))
    return folder


def write_public(given: dict, folder: Path) -> list[str]:
    """Write the files that a public repository has, and return the overrides that name them."""
    words = []
    if "triton" in given:
        words.append(f"migrate.path={write_repository(folder, given['triton'], given.get('model', 'tensorrt_llm'))}")
    if "engine" in given:
        place = folder / "tensorrt_llm" / "1" if "triton" in given else folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(given["engine"]))
        words = words or [f"migrate.path={folder}"]
    if "commands" in given:
        lines = [" ".join([f"python3 x/{program}".removeprefix("python3 x/trtllm-build") or program,
                           *(f"--{key} {value}" for key, value in options.items())])
                 for program, options in given["commands"]]  # fmt: skip
        script = folder.with_suffix(".sh")
        script.write_text("#!/bin/bash\n# Build\n" + "\n".join(line.replace(" --", " \\\n  --") for line in lines))
        words.append(f"migrate.path={script}")
    return words


def migrated(tmp_path: Path, *words: str) -> tuple[dict, str, str]:
    """Return the arguments, the page and the script."""
    out = tmp_path / "out"
    assert migrate([*words, f"migrate.folder={out}", f"paths.store={tmp_path / 'store'}"]) == 0
    (folder,) = out.iterdir()
    texts = [(folder / name).read_text() for name in ("extra_llm_api_options.yaml", "migration.md", "serve.sh")]
    return yaml.safe_load(texts[0]), texts[1], texts[2]


def section(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("given", PUBLIC, ids=lambda given: given["repository"].replace("/", "_"))
def test_public_deployments(given, tmp_path, capsys):
    words, expect = write_public(given, tmp_path / "given"), given["expect"]
    if "refused" in expect:
        with pytest.raises(UserError, match=expect["refused"]):
            migrated(tmp_path, *words)
        assert not (tmp_path / "out").exists()
        return
    if len(words) == 2:  # a repository, and beside it the script that built its engine
        script = Path(words.pop().removeprefix("migrate.path="))
        old = read_old(Path(words[0].removeprefix("migrate.path=")), None).merged(read_old(script, None))
        assert old.read == (f"{tmp_path}/given/tensorrt_llm/config.pbtxt", *(name for name, _ in given["commands"]))
        line = script.read_text().replace("\\\n", " ").splitlines()[-1]
        words.append(f'migrate.command="{line}"')
    arguments, page, _ = migrated(tmp_path, *words)
    with_formats = [word for word in words if "command" not in word] == words
    if with_formats or "dtype" not in expect["arguments"].get("kv_cache_config", {}):
        assert arguments == expect["arguments"]
    lost = re.findall(r"^\| (\S+?=\S+) \|", section(page, "Lost").replace("\\", ""), re.MULTILINE)
    assert lost == expect.get("lost", [])
    for text in (*expect.get("unknown", []), *expect.get("ignored", [])):
        assert text in section(page, "Unknown, or ignored today").replace("\\", "")


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.version)
def test_every_word_is_one_of_the_llm_api(table):
    """Names; values are judged when they are known."""
    rows = [row for part in ("build", "triton", "earlier") for row in WORDS[part].values()]
    words = {row["to"] for row in rows if row.get("to", "").islower()} | set(WORDS["sizes"].values())
    assert [word for word in words if not table.has(word)] == []
    for given in PUBLIC:
        assert complaints(given["expect"].get("arguments", {}), table.version, "") == []


def test_a_value_that_the_llm_api_refuses_is_lost(tmp_path):
    given = {"backend": "tensorrtllm", "max_batch_size": 8, "parameters": {"guided_decoding_backend": "outlines"}}
    arguments, page, _ = migrated(tmp_path, f"migrate.path={write_repository(tmp_path / 'given', given)}")
    assert arguments == {"max_batch_size": 8}
    assert "guided_decoding_backend='outlines' is not known" in section(page, "Lost").replace("\\", "")


def test_every_word_of_1_2_is_in_the_table():
    assert set(WORDS["build"]) == set(OPTIONS)
    assert set(TEMPLATE["tensorrt_llm"]) <= set(WORDS["triton"])
    assert {algo for algo in WORDS["convert"]["qformat"].values()} - {"FP8_PER_CHANNEL_PER_TOKEN"} <= set(BY_QUANT_ALGO)
    for row in [row for table in ("build", "triton", "earlier") for row in WORDS[table].values()]:
        assert len({"to", "lost", "needless"} & set(row)) == 1
        assert ("instead" in row) == ("lost" in row)
        assert row.get("needless", "kernels") in WORDS["reasons"]


def test_what_is_lost_has_its_measured_cost(tmp_path):
    for variant, divergence in {"int8_sq": 0.02, "fp8": 0.004, "w4a8_awq": 0.001}.items():
        folder = tmp_path / "store" / "fidelity" / f"tiny_llama-{variant}-{'0' * 16}"
        folder.mkdir(parents=True)
        facts = {"kl_mean": divergence, "top1_agreement": 0.98, "tokens": 4096}
        manifest = {"label": f"tiny_llama-{variant}", "created": "2026-11-28", "facts": facts, "stage": "fidelity"}
        (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))
    words = ("engine=tensorrt_llm", "model=tiny_llama", "quant=int8_sq", "hardware=l40s")
    _, page, script = migrated(tmp_path, *words)
    rows = re.findall(r"^\| (\w+) \| (\S+) \| (\S+) \| (\d*) ?\| (.*) \|$", section(page, "Lost"), re.MULTILINE)
    found = "newest fidelity in the store"
    assert rows[:3] == [
        ("int8_sq", "0.02", "98.00", "4096", found),
        ("w4a8_awq", "0.001", "98.00", "4096", found),
        ("fp8", "0.004", "98.00", "4096", found),
    ]
    assert rows[3][:4] == ("int4_awq", "–", "–", "")
    assert rows[3][4] == "unknown: measure with make fidelity model=tiny_llama quant=int4_awq engine=openvino"
    assert "make build engine=tensorrt_llm_llmapi model=tiny_llama quant=w4a8_awq" in script  # the least divergence


def test_a_format_is_judged_for_the_gpu(tmp_path):
    build = "quantize.py --qformat int8_sq --model_dir m ; trtllm-build --checkpoint_dir c"
    _, page, _ = migrated(tmp_path, f'migrate.command="{build}"', "hardware=a10")
    lost = section(page, "Lost")
    assert "quant=int4_awq engine=openvino" in lost
    assert "quant=fp8 engine=openvino" not in lost  # compute capability 8.6 has none


def test_a_model_without_the_llm_api_says_so(tmp_path):
    words = ("engine=tensorrt_llm", "model=gemma_2b", "quant=fp8", "hardware=h100_sxm")
    assert migrate([*words, f"migrate.folder={tmp_path}", f"paths.store={tmp_path / 'store'}"]) == 0
    (page,) = (path.read_text() for path in (tmp_path / "gemma_2b-fp8-kv_fp8").iterdir() if path.suffix != ".json")
    assert "cannot serve GemmaForCausalLM" in section(page, "Lost")
    assert "make build" not in section(page, "Next")


def test_several_instances_become_several_servers(tmp_path):
    given = {"backend": "tensorrtllm", "max_batch_size": 8, "parameters": {"gpu_device_ids": "0,1;2,3"}}
    repository = write_repository(tmp_path / "given", given)
    arguments, page, script = migrated(tmp_path, f"migrate.path={repository}")
    assert arguments == {"tensor_parallel_size": 2, "max_batch_size": 8}
    assert re.findall(r"^CUDA_VISIBLE_DEVICES=(\S+) trtllm-serve .*--port (\d+) .*&$", script, re.MULTILINE) == [
        ("0,1", "8000"),
        ("2,3", "8001"),
    ]
    assert "the engine's own split is not stated" in page


def test_several_machines_start_through_nvidias_launcher(tmp_path):
    given = {"backend": "tensorrtllm", "max_batch_size": 8, "parameters": {"num_nodes": "2"}}
    repository = write_repository(tmp_path / "given", given)
    write_engine(repository / "tensorrt_llm" / "1", tp_size=8, pp_size=2)
    arguments, page, script = migrated(tmp_path, f"migrate.path={repository}", "model=llama_3_1_8b")
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (8, 2)
    assert "mpirun --hostfile hosts -n 16 -x TRTLLM_NO_USAGE_STATS trtllm-llmapi-launch trtllm-serve" in script
    words = "engine=tensorrt_llm_llmapi model=llama_3_1_8b quant=fp8 build.tp_size=8 build.pp_size=2 triton.num_nodes=2"
    assert f"make scripts cluster=slurm {words}" in section(page, "Next")


def test_an_artifact_of_this_project_names_its_model(tmp_path):
    engine = write_engine(tmp_path / "engine")
    settings = {"model": {"name": "tiny_llama", "bundled": "tiny_llama", "path": None, "hub_id": None}}
    (engine / MANIFEST).write_text(json.dumps(sealed({"settings": settings})))
    _, page, _ = migrated(tmp_path, f"migrate.path={engine}")
    assert "make build engine=tensorrt_llm_llmapi model=tiny_llama quant=fp8" in section(page, "Next")


def engine(**changes) -> dict:
    config = engine_config("tensorrt_llm", tp_size=2, pp_size=1, logits_dtype="float32")
    config["pretrained_config"]["mapping"] |= changes
    return config


@pytest.mark.parametrize(
    ("files", "message", "todo"),
    [
        ({}, "holds neither an engine nor a model repository", "migrate.command=trtllm-build"),
        ({"rank0.engine": ""}, "has engines, but no config.json", "migrate.command=trtllm-build"),
        ({"config.json": engine(world_size=4)}, "tp_size=2, pp_size=1, cp_size=1; the engine has world_size=4", ""),
        ({"config.json": engine(), "rank0.engine": ""}, "tp_size=2.*the engine has 1 files", ""),
        ({"config.json": engine(tp_size=4096, world_size=4096)}, "split over 4096 GPUs. At most 1024", ""),
        ({"config.json": engine(tp_size="two")}, "is not as trtllm-build writes it", "migrate.command"),
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, "has no 'pretrained_config'", ""),
        ({"m/config.pbtxt": 'backend: "vllm"'}, "has 0 models with the backend tensorrtllm .m: vllm.", ""),
        ({f"{name}/config.pbtxt": 'backend: "tensorrtllm"' for name in "ab"}, "has 2 models with the backend", ""),
        ({"m/config.pbtxt": "max_batch_size: ${n}"}, r"still has \$\{n\}", "fill_template.py"),
    ],
)
def test_bad_folders_are_named_and_nothing_is_written(files, message, todo, tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        migrated(tmp_path, f"migrate.path={folder}")
    assert todo in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "key"),
    [
        (("pretrained_config", "quantization"), "quant_algo"),
        (("pretrained_config", "quantization"), "kv_cache_quant_algo"),
        (("build_config",), "speculative_decoding_mode"),
    ],
)
def test_a_value_of_another_type_is_named(part, key, tmp_path):
    config = engine()
    reduce(dict.__getitem__, part, config)[key] = ["FP8"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"is not as trtllm-build writes it: {key} is .*FP8"):
        migrated(tmp_path, f"migrate.path={tmp_path}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trtllm-build --max_batchsize 8", r"no option --max_batchsize\. Did you mean 'max_batch_size'\?"),
        ("trtllm-build --max_batch_size many", "--max_batch_size many. It takes a whole number"),
        ("trtllm-build --gemm_plugin float8", "It takes one of auto, float16"),
        ("echo hello", "has 0 trtllm-build commands"),
        ("trtllm-build --workers 1; trtllm-build --workers 2", "has 2 trtllm-build commands"),
        ("quantize.py --qformat fp9; trtllm-build --workers 1", "--qformat 'fp9'. Known: full_prec, fp8"),
        (
            "convert_checkpoint.py --tp_size 2; fill_template.py -i f gpu_device_ids:0; trtllm-build --workers 1",
            "gpu_device_ids has 0 for an instance; the engine is split over 2 GPUs",
        ),
        (
            "convert_checkpoint.py --tp_size 2; trtllm-build --tp_size 4",
            "convert_checkpoint.py has tp_size=2, trtllm-build tp_size=4",
        ),
    ],
)
def test_bad_commands_are_named_and_nothing_is_written(line, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message) if "\\" not in message else message):
        migrated(tmp_path, f'migrate.command="{line}"')
    assert not (tmp_path / "out").exists()


def read(tmp_path: Path, script: str) -> OldDeployment:
    (tmp_path / "build.sh").write_text(script)
    return read_old(tmp_path / "build.sh", None)


@pytest.mark.parametrize(
    "script",
    [
        "trtllm-build --max_batch_size 8 --max_seq_len 200 2>&1 | tee log",
        "(cd /engines && trtllm-build --max_seq_len 200 --max_batch_size 8)",
        'BS=8\ntrtllm-build --max_batch_size $BS --max_seq_len "${LENGTH:-200}"\nBS=16',
        "export BS=8 LENGTH=200\ntrtllm-build --max_batch_size $BS --max_seq_len ${LENGTH:-64}",
        'LIMITS="--max_seq_len 200 --max_batch_size 8"\nNOTHING=\ntrtllm-build $LIMITS $NOTHING',
    ],
)
def test_scripts_are_read_as_a_shell_reads_them(script, tmp_path):
    assert {each.name: each.value for each in read(tmp_path, script).settings} == {
        "max_batch_size": 8,
        "max_seq_len": 200,
    }


def test_a_variable_is_made_of_others(tmp_path):
    script = "NAME=llama\nMODEL=/models/$NAME\nquantize.py --model_dir=$MODEL --qformat fp8\ntrtllm-build --workers 1"
    assert read(tmp_path, script).model == "/models/llama"


@pytest.mark.parametrize("groups", ["0;1", r"0\,1;2\,3"])
def test_instances_in_quotes_are_read(groups, tmp_path):
    filled = f"-i f 'triton_max_batch_size:8,gpu_device_ids:{groups},kv_cache_free_gpu_mem_fraction:0.5'"
    old = read(tmp_path, f"fill_template.py {filled}\ntrtllm-build --tp_size {1 + groups.count(',') // 2}")
    values = {each.name: each.value for each in old.settings}
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.5"
    assert old.groups == tuple(tuple(group.split(",")) for group in groups.replace("\\", "").split(";"))


def test_an_engine_of_another_model_is_refused(tmp_path):
    made = engine(tp_size=1, world_size=1)
    made["pretrained_config"] |= {"num_hidden_layers": 6, "hidden_size": 256}
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text(json.dumps(made))
    words = (f"migrate.path={tmp_path / 'engine'}", "model=llama_3_1_8b")
    wrong = "than model=llama_3_1_8b: it has num_hidden_layers=6, hidden_size=256; the model has num_hidden_layers=32"
    with pytest.raises(UserError, match=wrong):
        migrated(tmp_path, *words)
    assert not (tmp_path / "out").exists()
    _, page, _ = migrated(tmp_path, *words, "prune=depth", "prune.layers=6")
    assert "prune=depth prune.layers=6" in section(page, "Next")


def test_it_takes_less_than_a_second(tmp_path, monkeypatch, capsys):
    """Of this process, so that other work on the machine does not count; tritonclient and the settings are loaded."""
    monkeypatch.chdir(tmp_path)
    repository = write_repository(tmp_path / "given", PUBLIC[0]["triton"])
    started = time.process_time()
    assert main(["migrate", f"migrate.path={repository}"]) == 0
    assert time.process_time() - started < 1
    capsys.readouterr()
    assert main(["migrate", f"migrate.path={repository}"]) == 0
    assert capsys.readouterr().out.startswith("unchanged: migrated/given")


DRAFTS = "trtllm-build --checkpoint_dir c --speculative_decoding_mode draft_tokens_external --max_draft_len 5"


def test_a_draft_model_that_is_named_is_in_the_options(tmp_path):
    named = ["speculative=draft_target", "model@speculative.draft=llama_3_2_1b", "model=llama_3_1_8b"]
    options, page, _ = migrated(tmp_path, f"migrate.command={DRAFTS}", *named)
    assert options["speculative_config"] == {
        "decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": "meta-llama/Llama-3.2-1B",
        "allow_advanced_sampling": True,
    }  # fmt: skip
    assert not [each for each in complaints(options, "1.4", "") if not each.ignored]
    assert "speculative=draft_target model@speculative.draft=llama_3_2_1b" in page


def test_one_that_is_not_named_is_asked_for(tmp_path):
    options, page, _ = migrated(tmp_path, f"migrate.command={DRAFTS}")
    assert "speculative_config" not in options
    assert "name it with speculative=draft_target speculative.draft.path=FOLDER" in page
