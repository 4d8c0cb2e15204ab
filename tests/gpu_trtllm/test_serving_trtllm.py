"""TensorRT-LLM's own backend serves our repository; what cannot be proven without a GPU."""

import json
import string
import urllib.request

import numpy as np
import pytest

from pipelines.domain.benchmark import RESULT, BenchmarkResult
from pipelines.host.machine import gather
from pipelines.predict.performance.deployment import load_fit
from pipelines.predict.performance.gpus import row_of
from pipelines.serving.config import ServingSettings
from pipelines.serving.process import TritonServer
from tests.conftest import ROOT
from tests.gpu_trtllm.conftest import MODEL, TEMPLATES

REFERENCE = ROOT / "triton_repo" / "template_params.json"


@pytest.fixture(scope="module")
def repository(cli, engine):
    cli.run("repository", f"engine.path={engine}", f"model.path={MODEL}")
    (folder,) = (cli.folder / "store" / "repository").glob("tiny_llama-none-*")
    return folder


@pytest.fixture(scope="module")
def server(repository):
    with TritonServer(repository, ServingSettings()) as running:
        yield running


def names(config) -> dict[str, set[str]]:
    return {"input": {t.name for t in config.input}, "output": {t.name for t in config.output}}


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"])
def test_the_containers_own_templates_have_our_tensors(repository, model):
    """The reference was read from single files of the 1.2 line; the container says what it really holds."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    usual = {"int": "1", "bool": "false", "triton dtype": "TYPE_FP32", "str": "python", "path": "/x"}
    parameters = json.loads(REFERENCE.read_text())[model]
    values = {name: usual[entry["type"]] for name, entry in parameters.items() if entry["required"]}
    template = string.Template((TEMPLATES / model / "config.pbtxt").read_text())
    theirs = text_format.Parse(template.safe_substitute(values, max_queue_size=0), ModelConfig())
    ours = text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())
    assert names(theirs) == names(ours)


def test_it_generates(server):
    body = json.dumps({"text_input": "The river of Githbrel is", "max_tokens": 8}).encode()
    with urllib.request.urlopen(f"{server.http_url}/v2/models/ensemble/generate", body, timeout=60) as answer:
        assert json.loads(answer.read())["text_output"].strip()


def test_it_streams_token_by_token(server):
    import queue

    import tritonclient.grpc as triton

    def tensor(name, values, kind):
        made = triton.InferInput(name, [1, len(values)], kind)
        made.set_data_from_numpy(np.array([values], dtype=triton.utils.triton_to_np_dtype(kind)))
        return made

    inputs = [
        tensor("input_ids", [5, 6, 7], "INT32"),
        tensor("input_lengths", [3], "INT32"),
        tensor("request_output_len", [8], "INT32"),
        tensor("streaming", [True], "BOOL"),
        tensor("end_id", [-1], "INT32"),
    ]
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True)
        sizes = []
        while True:
            result, error = answers.get(timeout=60)
            assert error is None
            if (tokens := result.as_numpy("output_ids")) is not None:
                sizes.append(tokens.shape[-1])
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
    assert sum(sizes) == 8


def test_its_metrics_are_those_of_the_dashboard(server):
    page = urllib.request.urlopen(server.metrics_url, timeout=10).read().decode()
    for family in ("nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_general_metrics"):
        assert family in page


@pytest.fixture(scope="module")
def measured(cli, engine):
    cli.run("benchmark", f"engine.path={engine}", f"model.path={MODEL}", "benchmark.concurrency=[1,4]")
    (folder,) = (cli.folder / "store" / "benchmark").glob("tiny_llama-none-*")
    return folder / RESULT


def test_it_is_measured(measured):
    result = BenchmarkResult.from_json(json.loads(measured.read_text()))
    assert (result.engine, result.complete, len(result.levels)) == ("tensorrt_llm", True, 2)
    assert all(level.summary.errors == {} for level in result.levels)


def test_the_performance_model_is_fitted_to_it(cli, measured):
    """The fit is found again by what was measured: `plan` shows it for the same deployment."""
    row = row_of(gather().gpus[0])
    if row is None:
        pytest.skip("conf/hardware does not know this GPU")
    words = (f"model.path={MODEL}", "quant=none", f"hardware={row.name}", "engine=tensorrt_llm")
    text = cli.run("calibrate", *words, f"sizing.measured={measured}")
    assert "multipliers on the performance model are fitted" in text
    (file,) = (cli.folder / "store" / "fits").glob("tiny_llama-none-*.json")
    made = load_fit(file)
    assert len(made.levels) == 2
    assert all(0.2 < made.levels[0]["modelled"]["ttft_s"][name] / made.levels[0]["measured"]["ttft_s"][name] < 5
               for name in ("mean", "p50"))  # fmt: skip
    assert "fitted to 2 loads" in " ".join(cli.run("plan", *words).split())
