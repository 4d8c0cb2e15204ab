"""The clients that people use, what each is asked for, and how its results are read.

Commands have the arguments that a client's own documentation recommends for a fixed length of answers. What a client
counts is compared with what the server counts; figures of speed are not looked at.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from eval.dataset import open_questions

ROOT = Path(__file__).resolve().parents[2]
ISL, OSL, REQUESTS = 40, 24, 12
SUBJECT, QUESTIONS = "veldan_law", 30


class UnfitError(Exception):
    """A client that did not get what it needs, and why."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engine has counted."""

    requests: int = 0
    given: int = 0
    made: int = 0

    def __sub__(self, other: Counts) -> Counts:
        """Return what was counted since."""
        return Counts(self.requests - other.requests, self.given - other.given, self.made - other.made)

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.given:,} + {self.made:,} tokens"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended with code 0."""

    out: str
    folder: Path
    counted: Counts


@dataclass(frozen=True, slots=True)
class Run:
    """One command of a client.

    Attributes:
        what: it asks for.
        command: words; `{name}` is an attribute of `Place`, `{programs}` the folder of our programs for libraries.
        result: makes the result of what came, or raises UnfitError.
    """

    what: str
    command: str
    result: Callable[[Finished], str]


@dataclass(frozen=True, slots=True)
class Client:
    """A client and its commands."""

    name: str
    packages: tuple[str, ...]
    runs: tuple[Run, ...]
    npm: tuple[tuple[str, str], ...] = ()
    needs_nvidia: bool = False
    prepare: Callable[[Path], None] | None = None


def answered(run: Finished) -> str:
    """Count the questions that one of our programs printed; see scripts/foreign/asked.py."""
    lines = [json.loads(line) for line in run.out.splitlines() if line.startswith('{"asked"')]
    failed = [line for line in lines if not line["fine"]]
    if failed or not lines:
        raise UnfitError("; ".join(f"{line['asked']}: {line['found']}" for line in failed) or "nothing was asked")
    return f"all {len(lines)} answered as it needs: " + "; ".join(line["asked"] for line in lines)


def same(run: Finished, prompt_tokens: float, made: float, requests: float, osl: int | None = None) -> str:
    """Compare a client's counts with the engine's, which may have seen more requests before (a warm-up).

    Raises:
        UnfitError: they differ, or answers are not as long as was asked for.
    """
    client = Counts(round(requests), round(prompt_tokens), round(made))
    if client != run.counted:
        raise UnfitError(f"the client counts {client}; the server {run.counted}")
    if osl is not None and made != osl * requests:
        raise UnfitError(f"{made} tokens in {requests} answers, {osl} in each were asked for")
    return f"{client}, as the server counts" + (f"; {osl} in every answer, as asked" if osl else "")


def aiperf(run: Finished) -> str:
    """Read AIPerf's results."""
    results = json.loads(next(run.folder.rglob("profile_export_aiperf.json")).read_text())
    if results["error_summary"]:
        raise UnfitError(str(results["error_summary"]))
    scraped = json.loads(next(run.folder.rglob("server_metrics_export.json")).read_text())
    if not (scraped["summary"]["endpoints_successful"] and "nv_trt_llm_request_metrics" in scraped["metrics"]):
        raise UnfitError("it found no metrics of the server")
    total = [results[f"total_usage_{kind}_tokens"]["avg"] for kind in ("prompt", "completion")]
    text = same(run, *total, results["request_count"]["avg"], OSL)
    return f"{text}; {len(scraped['metrics'])} metrics of the server scraped"


def guidellm(run: Finished) -> str:
    """Read GuideLLM's results; requests that it cut off at the end of a strategy are counted apart."""
    results = json.loads((run.folder / "benchmarks.json").read_text())["benchmarks"]
    totals = [each["metrics"]["request_totals"] for each in results]
    if any(total["errored"] for total in totals) or not all(total["successful"] for total in totals):
        raise UnfitError(f"requests by strategy: {totals}")
    counts = [sum(each["metrics"][f"{kind}_token_count"]["successful"]["total_sum"] for each in results)
              for kind in ("prompt", "output")]  # fmt: skip
    requests = sum(total["successful"] for total in totals)
    if sum(total["incomplete"] for total in totals) or len(results) > 1:  # the server saw those, and a trial before
        if counts[1] != OSL * requests:
            raise UnfitError(f"{counts[1]} tokens in {requests} answers, {OSL} in each were asked for")
        return f"{len(results)} strategies, {requests} answers of {OSL} tokens each, as asked, none failed"
    return same(run, *counts, requests, OSL)


def genai_perf(run: Finished) -> str:
    """Read genai-perf's results, whose lengths are its own tokenizer's."""
    results = json.loads(next(run.folder.rglob("*_genai_perf.json")).read_text())
    requests = results["request_count"]["avg"]
    if run.counted.requests < requests or run.counted.made != OSL * run.counted.requests:
        raise UnfitError(f"it counts {requests} requests, the server {run.counted}")
    return f"{requests:.0f} requests counted; the server {run.counted}, {OSL} in every answer, as asked"


def perf_analyzer(run: Finished) -> str:
    """Read perf_analyzer's table."""
    (row,) = csv.DictReader((run.folder / "perf.csv").read_text().splitlines())
    if float(row["Inferences/Second"]) <= 0 or run.counted.requests < REQUESTS:
        raise UnfitError(f"the server counts {run.counted}")
    return f"the server counts {run.counted}"


def clean(requests: int, made: int | None = None, fewer_than: int | None = None) -> Callable[[Finished], str]:
    """Expect a client to print no error, and the server to have counted this.

    Args:
        requests: that were answered.
        made: tokens of the answers.
        fewer_than: bound of these, where the client stops its request.
    """

    def result(run: Finished) -> str:
        if "error" in run.out.lower():
            raise UnfitError(f"it printed: {run.out[-300:]}")
        counted = run.counted
        as_asked = made in (None, counted.made) and (fewer_than is None or counted.made < fewer_than)
        if counted.requests != requests or not as_asked:
            raise UnfitError(f"{requests} requests were asked for; the server counts {counted}")
        return f"the server counts {run.counted}"

    return result


def lm_eval(metric: str, evaluated: str) -> Callable[[Finished], str]:
    """Compare lm-eval's answers with those of `make evaluate`, question by question."""

    def result(run: Finished) -> str:
        (file,) = run.folder.rglob("samples_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        theirs = {sample["doc_id"]: bool(sample[metric]) for sample in samples}
        records = json.loads((run.folder.parent / f"{evaluated}.json").read_text())["records"]
        ours = {record["index"]: record["correct"] for record in records if record["subject"] == SUBJECT}
        different = [number for number, right in theirs.items() if ours[number] != right]
        if different or len(theirs) != QUESTIONS:
            raise UnfitError(
                f"{len(theirs)} questions, other answers than `make evaluate` to those numbered {different}"
            )
        return f"{sum(theirs.values())} of {len(theirs)} right; each answer judged as by `make evaluate`"

    return result


def in_chats(run: Finished) -> str:
    """Count lm-eval's right answers in chats, whose prompts are not those of `make evaluate`."""
    (file,) = run.folder.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    if len(samples) != QUESTIONS or not all(sample["resps"][0][0].strip() for sample in samples):
        raise UnfitError(f"{len(samples)} questions, {QUESTIONS} were asked, or one without an answer")
    right = sum(bool(sample["exact_match"]) for sample in samples)
    return f"{right} of {len(samples)} right, in the bundled chat template, in which no model was trained"


def write_tasks(folder: Path) -> None:
    """Write the bundled questions of one subject as tasks of lm-eval, with prompts and metrics of the project's own."""
    data = ROOT / "eval" / "mini_mmlu" / "data" / SUBJECT
    for name in ("mini_mmlu", "mini_answers"):
        splits = {
            split: [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]
            for split in ("test", "dev")
        }
        if name == "mini_answers":
            splits = open_questions(splits)
        files = {split: str(folder / f"{name}_{split}.jsonl") for split in splits}
        for split, rows in splits.items():
            Path(files[split]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        ours = (ROOT / "eval" / "tasks" / f"_{name}_template_yaml").read_text()
        task = yaml.safe_load("\n".join(line for line in ours.splitlines() if "custom_dataset" not in line))
        about = yaml.safe_load((ROOT / "eval" / "tasks" / f"{name}_{SUBJECT}.yaml").read_text())
        task |= {"task": f"{name}_{SUBJECT}", "description": about.get("description", "")}
        task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def write_inputs(folder: Path) -> None:
    """Write the requests that perf_analyzer repeats."""
    text = {"text_input": ["The river of Githbrel is"], "max_tokens": [OSL], "stream": [True]}
    tokens = {"input_ids": {"content": list(range(5, 5 + ISL)), "shape": [ISL]}, "input_lengths": [ISL],
              "request_output_len": [OSL], "streaming": [True]}  # fmt: skip
    for name, tensors in (("ensemble", text), ("tensorrt_llm", tokens)):
        (folder / f"{name}.json").write_text(json.dumps({"data": [tensors]}))


BENCHMARK = (
    "aiperf profile --model {model} --url {front} --tokenizer {tokenizer} --streaming --synthetic-input-tokens-mean"
    f" {ISL} --synthetic-input-tokens-stddev 0 --output-tokens-mean {OSL} --output-tokens-stddev 0 --extra-inputs"
    f" ignore_eos:true --extra-inputs min_tokens:{OSL} --request-count {REQUESTS} --ui simple"
)
GUIDELLM = (
    "guidellm run --backend kind=openai_http,target={front},model={model} --tokenizer kind=hf_auto,model={tokenizer}"
    f" --data kind=synthetic_text,prompt_tokens={ISL},output_tokens={OSL} --output kind=json,path=benchmarks.json"
    " --disable-console-interactive"
)
GENAI_PERF = (
    "genai-perf profile -m {model} -u {front} --tokenizer {tokenizer} --streaming --synthetic-input-tokens-mean"
    f" {ISL} --output-tokens-mean {OSL} --extra-inputs ignore_eos:true --extra-inputs min_tokens:{OSL}"
    f" --request-count {REQUESTS} --concurrency 2"
)
PERF_ANALYZER = (
    "perf_analyzer -i grpc -u {grpc} --streaming --async --concurrency-range 2"
    f" --request-count {REQUESTS} -f perf.csv"
)
LM_EVAL = "lm_eval --include_path . --limit {questions} --num_fewshot 5 --log_samples --output_path results --tasks"
COMPLETIONS = (
    "--model local-completions --model_args"
    " model={model},base_url={openai}/completions,tokenizer={tokenizer},num_concurrent=2,max_retries=1"
)
CHAT = (
    "--model local-chat-completions --model_args"
    " model={model},base_url={openai}/chat/completions,num_concurrent=2,max_retries=1"
)
FEW = f"--constraint kind=max_requests,count={REQUESTS}"
BATCHER = (
    "python {nvidia}/inflight_batcher_llm/client/inflight_batcher_llm_client.py -u {grpc} --tokenizer-dir {tokenizer}"
    ' --text "The river of Githbrel is" --streaming'
)
LONG = f"{BATCHER} --request-output-len 150 --request-id 7 --stop-after-ms 50"
END_TO_END = (
    "python {nvidia}/inflight_batcher_llm/client/end_to_end_grpc_client.py -u {grpc}"
    f' -p "The river of Githbrel is" -o {OSL}'
)
CORE = (
    "python {nvidia}/tools/inflight_batcher_llm/benchmark_core_model.py -i grpc -u {grpc} --decoupled"
    f" --max-input-len 128 --num-requests {REQUESTS} -c 2"
)
PERF_ANALYZER_LIBRARY = "nvidia-cuda-runtime-cu12==12.9.79"
TRITON = ("tritonclient[all]==2.49.0", "transformers", "pandas", "tabulate", PERF_ANALYZER_LIBRARY)
"""tritonclient in a release whose wheel has perf_analyzer, and what NVIDIA's clients import."""

CLIENTS = (
    Client("openai", ("openai==3.57.0",), (Run("", "python {programs}/openai_client.py {openai} {model}", answered),)),
    Client("LangChain", ("langchain-openai==1.7.4",),
           (Run("", "python {programs}/langchain_client.py {openai} {model}", answered),)),
    *(Client(name, packages, (Run("", "python {programs}/agents_client.py {openai} {model}", answered),))
      for name, packages in (
          ("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)),
          ("openai-agents", ("openai-agents==0.24.0",)),
          ("LlamaIndex", ("llama-index-llms-openai-like==0.8.1",)),
          ("haystack", ("haystack-ai==3.4.1",)),
          ("instructor", ("instructor==1.17.0",)),
      )),
    Client("openai of npm", (), (Run("", "node {programs}/openai_client.mjs {openai} {model}", answered),),
           npm=(("openai", "6.49.0"),)),
    Client("Vercel AI SDK", (), (Run("", "node {programs}/vercel_client.mjs {openai} {model}", answered),),
           npm=(("ai", "6.0.326"), ("@ai-sdk/openai", "3.0.141"), ("@ai-sdk/openai-compatible", "2.0.92"),
                ("zod", "4.6.7"))),
    Client("LiteLLM", ("litellm==1.110.2",),
           (Run("", "python {programs}/litellm_client.py {openai} {model} {front}", answered),)),
    Client("AIPerf", ("aiperf==0.13.0",), (
        Run("chat, concurrency", f"{BENCHMARK} --endpoint-type chat --concurrency 4", aiperf),
        Run("chat, request rate", f"{BENCHMARK} --endpoint-type chat --request-rate 4", aiperf),
        Run("completions, request rate and concurrency",
            f"{BENCHMARK} --endpoint-type completions --request-rate 4 --concurrency 2", aiperf),
    )),
    Client("GuideLLM", ("guidellm==0.8.1", "torch==2.13.0"), (
        Run("chat, its default, concurrency", f"{GUIDELLM} --profile kind=concurrent,streams=4 {FEW}", guidellm),
        Run("completions, one at a time",
            GUIDELLM.replace("openai_http,", "openai_http,request_format=/v1/completions,")
            + f" --profile kind=synchronous {FEW}", guidellm),
        Run("a sweep", f"{GUIDELLM} --profile kind=sweep,sweep_size=3,max_concurrency=8"
            " --constraint kind=max_duration,seconds=5", guidellm),
    )),
    Client("genai-perf", ("genai-perf==0.0.16", "tritonclient==2.49.0", PERF_ANALYZER_LIBRARY), (
        Run("chat", f"{GENAI_PERF} --endpoint-type chat", genai_perf),
        Run("completions", f"{GENAI_PERF} --endpoint-type completions", genai_perf),
    )),
    Client("perf_analyzer", TRITON, (
        Run("`ensemble`, streamed", f"{PERF_ANALYZER} -m ensemble --input-data ensemble.json", perf_analyzer),
        Run("`tensorrt_llm`, streamed", f"{PERF_ANALYZER} -m tensorrt_llm --input-data tensorrt_llm.json",
            perf_analyzer),
    ), prepare=write_inputs),
    Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers", "torch==2.13.0"), (
        Run("log likelihoods by echo and logprobs, prompts of tokens",
            f"{LM_EVAL} mini_mmlu_{SUBJECT} {COMPLETIONS},tokenized_requests=True",
            lm_eval("acc", "mini_mmlu")),
        Run("the same, prompts of text",
            f"{LM_EVAL} mini_mmlu_{SUBJECT} {COMPLETIONS},tokenized_requests=False",
            lm_eval("acc", "mini_mmlu")),
        Run("answers", f"{LM_EVAL} mini_answers_{SUBJECT} {COMPLETIONS},tokenized_requests=False",
            lm_eval("exact_match", "mini_answers")),
        Run("answers in chats", f"{LM_EVAL} mini_answers_{SUBJECT} {CHAT} --apply_chat_template", in_chats),
    ), prepare=write_tasks),
    Client("inflight_batcher_llm_client.py", TRITON, (
        Run("`tensorrt_llm`, log probabilities", f"{BATCHER} --request-output-len {OSL} --return-log-probs",
            clean(1, OSL)),
        Run("stopped by its id", LONG, clean(1, fewer_than=150)),
        Run("cancelled", f"{LONG} --stop-via-request-cancel", clean(1, fewer_than=150)),
    ), needs_nvidia=True),
    Client("end_to_end_grpc_client.py", TRITON, (
        Run("`ensemble`, whole", END_TO_END, clean(1, OSL)),
        Run("`ensemble`, streamed", f"{END_TO_END} --streaming", clean(1, OSL)),
        Run("`tensorrt_llm_bls`, streamed", f"{END_TO_END} --streaming --model-name tensorrt_llm_bls", clean(1, OSL)),
    ), needs_nvidia=True),
    Client("benchmark_core_model.py", TRITON, (
        Run("random tokens (`triton.fold_token_ids=true`), after its 10 requests of 100 tokens to warm up",
            f"{CORE} token-norm-dist --input-mean {ISL} --input-stdev 0 --output-mean {OSL} --output-stdev 0",
            clean(REQUESTS + 10, REQUESTS * OSL + 10 * 100)),
    ), needs_nvidia=True),
)  # fmt: skip
