"""Two nights of a small GPU matrix with TensorRT engines: done, comparable, and nothing got worse."""

import json

WORDS = [
    "nightly=gpu", "model=tiny_llama", "quant=none,fp8", "workload=fixed", "calibration=bundled", "eval=mini_mmlu",
    "eval.limit=5", "build.max_seq_len=1024", "build.max_input_len=512", "workload.isl=128", "workload.osl=32",
    "benchmark.concurrency=[4]", "benchmark.duration_s=3", "benchmark.warmup_s=1",
]  # fmt: skip


def test_the_gpu_matrix_runs_twice(cli):
    for _ in range(2):
        assert "2 cells measured" in cli.run("nightly", *WORDS)
    records = [json.loads(line) for line in (cli.folder / "nightly" / "gpu" / "history.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records] == ["done"] * 4
    assert {record["engine"] for record in records} == {"tensorrt_llm"}
    assert all(record["machine"]["gpus"] and " x " in record["machine_class"] for record in records)
    assert all("tensorrt-llm" in record["versions"] for record in records)
