"""What is taken out of tritonserver's log; the lines are real ones."""

import pytest

from pipelines.serving.logs import FRONT_STARTED, LoadWatch, load_failures, loading_now, taken_port, useful_lines

NOISE = [
    'W1121 09:31:02.712236 7160 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory'
    ' pool will not be available: CUDA driver version is insufficient for CUDA runtime version"',
    'I1121 09:31:02.712311 7160 cuda_memory_manager.cc:117] "CUDA memory pool disabled"',
    'E1121 09:31:02.712404 7160 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
    'W1121 09:31:06.086357 7160 metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
]
LOADING = [
    'I1121 09:31:40.195412 7661 model_lifecycle.cc:472] "loading: bad:1"',
    'I1121 09:31:40.196862 7661 model_lifecycle.cc:472] "loading: good:1"',
]
LOADED = "I1121 09:31:42.328920 7661 model_lifecycle.cc:839] \"successfully loaded 'good'\""
FAILED = (
    "E1121 09:31:40.605301 7661 model_lifecycle.cc:642] \"failed to load 'bad' version 1: Internal: {}"
    '\\n\\nAt:\\n  /repo/bad/1/model.py(6): initialize\\n"'
)


def reason(text: str) -> str:
    return load_failures([*NOISE, *LOADING, FAILED.format(text), LOADED])[0].reason


def test_a_failure_is_its_exception_and_its_place() -> None:
    """Status, table and traceback are gone."""
    (failure,) = load_failures([*NOISE, FAILED.format("ValueError: too old: 0.1")])
    assert str(failure) == "model 'bad' does not load: ValueError: too old: 0.1 (model.py:6)"


def test_errors_that_explain_themselves_lose_their_class() -> None:
    assert reason("c_python_backend_utils.TritonModelException: Build it again.") == "Build it again"
    assert reason("UserError: Build it again.") == "Build it again"
    assert reason("no exception at all") == "no exception at all"


def test_a_broken_configuration_is_told_with_its_line() -> None:
    lines = [
        "[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 1:7: Expected string.",
        "E1121 09:52:40.1 1 model_repository_manager.cc:1460] \"Poll failed for model directory 'x': failed to read"
        ' text proto"',
    ]
    assert load_failures(lines)[0].reason == "failed to read text proto: 1:7: Expected string"


def test_models_that_only_depend_on_the_broken_one_are_left_out() -> None:
    chained = FAILED.format("ensemble 'all' depends on 'bad' which has no loaded version").replace("'bad' v", "'all' v")
    assert [failure.model for failure in load_failures([FAILED.format("ValueError: x"), chained])] == ["bad"]


def test_what_a_service_says_at_its_start_is_no_reason_for_its_end() -> None:
    assert useful_lines([FRONT_STARTED + "\n"]) == []


def test_a_machine_without_gpu_is_no_problem() -> None:
    assert useful_lines(NOISE) == []
    assert load_failures([*NOISE, LOADED]) == []


def test_error_lines_come_before_what_was_printed() -> None:
    printed = "the model says hello"
    error = 'E1121 09:34:54.437222 8216 main.cc:245] "something is wrong"'
    assert useful_lines([*NOISE, printed, error]) == ["something is wrong"]
    assert useful_lines([*NOISE, *LOADING, printed]) == [printed]


SEGFAULT = [
    "Signal (11) received.",
    " 0# 0x000055F45733452D in /opt/tritonserver/bin/tritonserver",
    " 1# 0x00007FC1CFE5A050 in /lib/x86_64-linux-gnu/libc.so.6",
    " 2# __socket in /lib/x86_64-linux-gnu/libc.so.6",
    "",
]
EARLIER = 'E1121 09:31:02.712404 7160 model.py:1] "tensorrt_llm: a request could not be read"'


@pytest.mark.parametrize(
    ("last_lines", "said"),
    [
        (
            ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"],
            ["terminate called after throwing an instance of 'std::bad_alloc'", "what():  std::bad_alloc"],
        ),
        (["malloc(): unaligned fastbin chunk detected"], ["malloc(): unaligned fastbin chunk detected"]),
        (
            ["tritonserver: http_server.cc:12: void f(): Assertion `shape > 0' failed."],
            ["tritonserver: http_server.cc:12: void f(): Assertion `shape > 0' failed."],
        ),
        (
            [
                "Traceback (most recent call last):",
                '  File "scheduler.py", line 170, in _guarded',
                "RuntimeError: Exception from src/inference/src/cpp/infer_request.cpp:223:",
                "Check 'block_table.size() > 0' failed at src/cpp/src/block_manager.hpp:17:",
            ],
            [
                "RuntimeError: Exception from src/inference/src/cpp/infer_request.cpp:223:",
                "Check 'block_table.size() > 0' failed at src/cpp/src/block_manager.hpp:17:",
            ],
        ),
    ],
)
def test_a_crash_is_told_in_its_own_words(last_lines: list[str], said: list[str]) -> None:
    """Not with an older error of the server, and without the stack and signal that follow."""
    assert useful_lines([*NOISE, EARLIER, *last_lines, *SEGFAULT]) == said


def test_a_stack_alone_says_nothing() -> None:
    assert useful_lines([*NOISE, *SEGFAULT]) == []


def test_a_taken_port_is_found() -> None:
    line = (
        'E1121 09:34:54.437222 8216 main.cc:245] "failed to start GRPC service: Unavailable - '
        "Socket '127.0.0.1:18101' already in use \""
    )
    assert taken_port([*NOISE, line]) == 18101
    assert taken_port(NOISE) is None


class Notes:
    """Remembers notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_long_load_says_which_model_and_how_long() -> None:
    """A line after 15 s of silence, not after 14; progress starts the count anew."""
    notes, steps = Notes(), []
    watch = LoadWatch(steps.append, notes, 600)  # type: ignore[arg-type]
    watch.update(LOADING, 14.0)
    watch.update(LOADING, 15.0)
    watch.update([*LOADING, LOADED], 16.0)
    watch.update([*LOADING, LOADED], 30.0)
    assert notes.texts == ["bad, good: 15 s of at most 10 min 0 s"]
    assert steps == [1]
    assert loading_now([*LOADING, LOADED]) == ["bad"]
