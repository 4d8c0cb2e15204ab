"""The real tritonserver loads what is generated, and tells clients the tensors of the reference.

The models' code is a stand-in here: the configurations are what is tested.
"""

import json

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.engine_folders import write_engine, write_tokenizer
from tests.support.own_tensors import OWN
from triton_repo import write
from triton_repo.config import TritonSettings
from triton_repo.generate import parse
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

pytest.importorskip("pytriton", reason="nvidia-pytriton carries the tritonserver binary")
grpc = pytest.importorskip("tritonclient.grpc")

REFERENCE = json.loads((ROOT / "triton_repo" / "template_tensors.json").read_text())
HEAD = """
import numpy as np
import triton_python_backend_utils as pb

def tensor(name, value, dtype):
    return pb.Tensor(name, np.array(value, dtype=dtype))

def given(request, name):
    return pb.get_input_tensor_by_name(request, name).as_numpy()
"""
CODE = {
    "preprocessing": """
class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([
            tensor("INPUT_ID", [list(given(request, "QUERY")[0, 0])], np.int32),
            tensor("REQUEST_INPUT_LEN", [[len(given(request, "QUERY")[0, 0])]], np.int32),
            tensor("DECODER_INPUT_ID", [[0]], np.int32),
            tensor("REQUEST_DECODER_INPUT_LEN", [[1]], np.int32),
            tensor("BAD_WORDS_IDS", np.zeros((1, 2, 0)), np.int32),
            tensor("STOP_WORDS_IDS", np.zeros((1, 2, 0)), np.int32),
            tensor("EMBEDDING_BIAS", np.zeros((1, 0)), np.float32),
            tensor("REQUEST_OUTPUT_LEN", given(request, "REQUEST_OUTPUT_LEN"), np.int32),
            tensor("OUT_END_ID", [[0]], np.int32),
            tensor("OUT_PAD_ID", [[0]], np.int32),
            tensor("OUT_PROMPT_TABLE_EXTRA_IDS", [[0]], np.uint64),
        ]) for request in requests]
""",
    "tensorrt_llm": """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            ids, count = given(request, "input_ids"), int(given(request, "request_output_len").reshape(-1)[0])
            for _ in range(count):
                sender.send(pb.InferenceResponse([
                    tensor("output_ids", [[[ids[0, 0]]]], np.int32), tensor("sequence_length", [[1]], np.int32)]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    "postprocessing": """
class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([
            tensor("OUTPUT", [bytes(given(request, "TOKENS_BATCH").reshape(-1).tolist())], object),
        ]) for request in requests]
""",
    "tensorrt_llm_bls": """
class TritonPythonModel:
    def execute(self, requests):
        return None
""",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A running server on a generated CPU repository."""
    from pipelines.serving.config import ServingSettings
    from pipelines.serving.process import TritonServer

    root = tmp_path_factory.mktemp("served")
    for name, code in CODE.items():
        (root / "sources" / name).mkdir(parents=True)
        (root / "sources" / name / "model.py").write_text(HEAD + code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "SOURCES", root / "sources")
        write_repository(
            root / "repo",
            engine_dir=write_engine(root / "engine", "openvino"),
            tokenizer_dir=write_tokenizer(root / "model"),
            settings=TritonSettings(max_queue_size=5),
            spec=RepositorySpec("openvino", "tiny", "none"),
            made_from={},
        )
    with TritonServer(root / "repo", ServingSettings()) as server:
        yield root / "repo", grpc.InferenceServerClient(server.grpc_url)


@pytest.mark.parametrize("model", [*sorted(CODE), "ensemble"])
def test_clients_see_the_tensors_of_the_reference(served, model):
    metadata = served[1].get_model_metadata(model)
    for kind, found in (("inputs", metadata.inputs), ("outputs", metadata.outputs)):
        known = [*REFERENCE[model][kind], *OWN.get(model, {}).get(kind, [])]
        assert [tensor.name for tensor in found] == list(dict.fromkeys(tensor["name"] for tensor in known))


def test_the_server_runs_what_the_file_says(served):
    """It fills in defaults, and changes nothing that is given."""
    repo, client = served
    ours = parse((repo / "tensorrt_llm" / "config.pbtxt").read_text())
    theirs = client.get_model_config("tensorrt_llm").config
    for field in ("input", "output", "parameters", "dynamic_batching", "model_transaction_policy", "max_batch_size"):
        assert getattr(theirs, field) == getattr(ours, field), field


def test_the_ensemble_follows_the_engines_transaction_policy(served):
    assert served[1].get_model_config("ensemble").config.model_transaction_policy.decoupled


@pytest.mark.timeout(60)
def test_a_stream_runs_through_the_wired_ensemble(served):
    """Text in, one response per token out: every wire carries what it must."""
    import queue

    answers: queue.Queue = queue.Queue()
    text = grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"Hi"]], dtype=object))
    count = grpc.InferInput("max_tokens", [1, 1], "INT32")
    count.set_data_from_numpy(np.array([[3]], dtype=np.int32))
    client = served[1]
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("ensemble", [text, count])
        found = [answers.get(timeout=30) for _ in range(3)]
    finally:
        client.stop_stream()
    assert [error for _, error in found] == [None] * 3
    assert [result.as_numpy("text_output").tolist() for result, _ in found] == [[b"H"]] * 3
