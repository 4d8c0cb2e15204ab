"""The table of commands. Standard library only, so that help needs nothing that `make setup` installs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

PROGRAM = "trtllm-pipelines"

EXITS = {
    0: "done",
    1: "a crash; its traceback is in the run's log",
    2: "the input is at fault: a word, a value, a file, or something this machine lacks",
    130: "interrupted by Ctrl-C or SIGTERM",
}
"""Exit codes of every command."""

MODEL = ("model", "quant", "prune", "sparsity", "recover", "kv_cache", "calibration")
ENGINE = ("engine", "build", "runtime", "lora", "speculative", "multimodal", "hardware")
PRESETS = ("experiment", "parallel", "window", "weights", "reuse", "guided")
"""Groups without keys of their own: each choice sets keys of other groups."""
SERVER = ("triton", "serving")
LOAD = ("workload", "benchmark")
BUILD = (*MODEL, *ENGINE, *PRESETS, "paths")


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        function: "module:function"; it takes the overrides and returns the exit code.
        summary: one line for the list of commands.
        about: what it does, in a few sentences.
        groups: settings that it reads.
        examples: three command lines, without the program's name.
        exits: exit codes with another meaning than in `EXITS`.
        argument: a word that is not an override, for the usage line, e.g. "[GROUP]".
    """

    function: str
    summary: str
    about: str
    groups: tuple[str, ...]
    examples: tuple[str, str, str]
    exits: dict[int, str] = field(default_factory=dict)
    argument: str = ""

    def run(self, overrides: Sequence[str]) -> int:
        """Import the function and call it."""
        module, _, name = self.function.partition(":")
        code: int = getattr(importlib.import_module(module), name)(overrides)
        return code


NOT_MEASURED = "NOT MEASURED: the baseline does not beat guessing, or was asked nothing, so no loss could be measured"
CELL_FAILED = "a cell failed; the others are finished and kept"
INCOMPLETE = "the benchmark is incomplete, or a crash; what was measured is kept"

COMMANDS = {
    "all": Command(
        "pipelines.run.commands:run_all",
        "everything: engine, accuracy, repository, server, benchmark, report",
        "Runs the whole pipeline: downloads or reads the model, quantizes it, builds the engine, measures its accuracy "
        "and fidelity beside the 16-bit baseline, writes the Triton repository, serves and benchmarks it, and writes "
        "the report. Stages that are already in the store are not run again.",
        (*BUILD, "eval", "fidelity", *SERVER, *LOAD, "report"),
        ("all quant=int4_awq", "all model=tiny_llama quant=fp8 kv_cache=fp8", "all experiment=cpu_demo"),
        {1: INCOMPLETE, 4: NOT_MEASURED},
    ),
    "build": Command(
        "pipelines.run.commands:build",
        "model -> quantized TensorRT-LLM checkpoint -> engine",
        "Downloads or reads the model, makes it sparse and quantizes it as the settings say, writes a TensorRT-LLM "
        "checkpoint and builds the engine from it. Stages that are already in the store are not run again.",
        BUILD,
        (
            "build quant=int4_awq",
            "build model=gemma_2b quant=fp8 build.max_batch_size=64",
            "build model.path=/models/my-llama quant=int8_sq",
        ),
    ),
    "evaluate": Command(
        "pipelines.run.commands:evaluate",
        "build, then accuracy beside the 16-bit baseline",
        "Builds the engine and its 16-bit baseline, asks both the questions of the task, and shows the two accuracies "
        "with a verdict on the loss: GO, NO-GO, UNDECIDED or NOT MEASURED (docs/accuracy.md). "
        "eval.baseline=hugging_face compares with the original model instead.",
        (*BUILD, "eval", "fidelity"),
        (
            "evaluate quant=int4_awq",
            "evaluate quant=int4_awq eval=quick",
            "evaluate eval=mmlu model=gemma_2b quant=fp8",
        ),
        {4: NOT_MEASURED},
    ),
    "fidelity": Command(
        "pipelines.run.commands:fidelity",
        "build, then how far its predictions are from the 16-bit model's",
        "Builds the engine and its 16-bit baseline, lets both read the same texts, and shows how far the probabilities "
        "of each next token are apart, beside the noise of the 16-bit model itself. It takes a minute and asks no "
        "questions: it finds what is damaged, and `evaluate` decides what is good enough. With eval.url a server that "
        "runs already is asked, which gives bounds.",
        (*BUILD, "fidelity", "eval"),
        (
            "fidelity quant=int4_awq fidelity.path=/my/texts.jsonl",
            "fidelity quant=int4_wo fidelity.by_layer=true",
            "fidelity eval.url=http://host:8000/v1",
        ),
    ),
    "diagnose": Command(
        "pipelines.run.commands:diagnose",
        "which stage answers wrongly, and there the layer and the tensor",
        "Puts the same prompts through every stage: the model in Transformers, the checkpoint, the engine, Triton's "
        "models and the OpenAI-compatible service. It names the first that differs from the one before it by more than "
        "the noise, the layer, the tensor and the probable cause. With eval.url a server that runs already is asked.",
        (*BUILD, "diagnose", "eval", *SERVER),
        (
            "diagnose quant=int4_awq",
            "diagnose quant=fp8 eval.url=http://host:8000/v1",
            "diagnose diagnose.checkpoint=/its/folder diagnose.engine=/its/engine",
        ),
        {3: "a stage is accused"},
    ),
    "compare": Command(
        "pipelines.sweep.sweep_command:compare",
        "several settings side by side: accuracy, size and speed",
        "Runs everything that `all` runs for each combination of the values given as comma lists, one after the other "
        "or with a launcher, then prints one table and writes one report per model.",
        (*BUILD, "eval", "fidelity", *SERVER, *LOAD, "report", "hydra/launcher"),
        (
            "compare quant=none,fp8,int4_awq",
            "compare model=tiny_gemma,tiny_llama quant=int8_sq",
            "compare quant=fp8,int8_sq hydra/launcher=slurm",
        ),
        {1: CELL_FAILED, 4: NOT_MEASURED},
    ),
    "sweep": Command(
        "pipelines.sweep.sweep_command:sweep",
        "several settings side by side: accuracy alone",
        "Evaluates each combination of the values given as comma lists, one after the other or with a launcher, and "
        "prints one table of accuracies.",
        (*BUILD, "eval", "hydra/launcher"),
        (
            "sweep quant=fp8,int8_sq,int4_awq",
            "sweep quant=none sparsity=magnitude_2_4,sparsegpt_2_4",
            "sweep quant=fp8,int8_sq hydra/launcher=joblib",
        ),
        {1: CELL_FAILED, 4: NOT_MEASURED},
    ),
    "smallest": Command(
        "pipelines.sweep.smallest:smallest",
        "the mix of formats with the fewest bits per weight that is still GO",
        "Evaluates mixes that quant=auto finds within one bound on the bits per weight after another, most bits first, "
        "then halving what is left, and prints what was tried and the command that builds the smallest whose loss is "
        "proven to be below eval.margin_points.",
        (*BUILD, "eval", "hydra/launcher"),
        (
            "smallest quant=auto",
            "smallest quant=auto eval.margin_points=2 model=tiny_llama",
            "smallest quant=auto quant.candidates=[int8_sq,int4_awq]",
        ),
        {1: CELL_FAILED, 3: "no mix of these formats is GO", 4: NOT_MEASURED},
    ),
    "stage": Command(
        "pipelines.run.commands:stage",
        "one stage of the plan with what it needs, and a link to its result",
        "Runs one of the stages that `plan` lists, and those it needs, and nothing else: to quantize on a machine "
        "without a GPU, for example. With stage.link=NAME the result is found under that name.",
        ("stage", *BUILD, "eval", "fidelity", "diagnose", *SERVER),
        (
            "stage stage.name=quantize quant=fp8 engine=tensorrt_llm model=gemma_2b hardware=h100_sxm",
            "stage stage.name=quantize stage.link=checkpoint model=tiny_llama quant=int4_awq",
            "stage stage.name=repository stage.link=repository engine.path=/its/folder",
        ),
        {4: NOT_MEASURED},
    ),
    "verify": Command(
        "pipelines.run.verify:verify",
        "read the store, an artifact or a checkpoint back and check every byte",
        "Alone, reads every artifact of the store from the disk, compares it with its manifest, and names what is "
        "damaged and the command that makes it again. With a folder, or with a configuration (its checkpoint), does "
        "the same for one artifact. Of a TensorRT-LLM checkpoint it also lists the tensors and checks names, types, "
        "shapes and scales against the rules of its format.",
        (*BUILD, "verify"),
        ("verify", "verify verify.path=/some/checkpoint", "verify model=tiny_llama quant=fp8"),
        {2: "something is damaged, the checkpoint has faults or is missing, or the input is at fault"},
    ),
    "repository": Command(
        "pipelines.run.commands:repository",
        "engine -> Triton model repository, a folder that can be copied",
        "Builds the engine and writes a Triton model repository around it: preprocessing, engine, postprocessing, "
        "ensemble and BLS. The folder holds everything that a server needs.",
        (*BUILD, *SERVER),
        (
            "repository quant=fp8",
            "repository triton=openai quant=int4_awq",
            "repository engine.path=/engines/llama model.path=/hf/llama",
        ),
    ),
    "serve": Command(
        "pipelines.run.commands:serve",
        "tritonserver in the foreground; Ctrl-C drains it",
        "Builds what is missing and starts tritonserver on the repository. Ctrl-C lets running requests finish and "
        "ends the server; a second Ctrl-C ends them.",
        (*BUILD, *SERVER),
        (
            "serve quant=int4_awq",
            "serve triton=openai serving.openai=true",
            "serve serving.repository=/copied/repository serving.http_port=8000",
        ),
        {
            0: "drained",
            1: "the server ended by itself, or a crash",
            130: "interrupted before it was ready, or a second time",
        },
    ),
    "benchmark": Command(
        "pipelines.run.commands:benchmark",
        "serve and measure; benchmark.url=... for a server elsewhere",
        "Starts a server on the engine, or takes one that runs elsewhere, sends it the workload at each load and "
        "records TTFT, ITL, E2E latency, throughput and goodput.",
        (*BUILD, *SERVER, *LOAD),
        (
            "benchmark quant=fp8 benchmark.concurrency=[1,8,32]",
            "benchmark workload=poisson benchmark.request_rate=[2,4,8]",
            "benchmark benchmark.url=http://host:8000/v1 benchmark.api=chat",
        ),
        {1: INCOMPLETE},
    ),
    "report": Command(
        "pipelines.report.report_command:report",
        "Markdown and one HTML file from what was made and measured",
        "Writes the report of a model from what the store holds: formats, accuracy, sizes, loads and pictures. It "
        "measures nothing.",
        ("model", "report", "eval", "paths"),
        ("report", "report model=tiny_llama", "report eval.margin_points=0.5 report.max_accuracy_loss_percent=0.5"),
    ),
    "plan": Command(
        "pipelines.run.commands:plan",
        "what would run, what is cached and why; writes nothing",
        "Checks the whole configuration and this machine, and lists each stage with what is cached, what would run "
        "and why, the memory it takes, and for a GPU the exact commands and the modelled speed.",
        ("plan", *BUILD, "eval", "fidelity", "diagnose", *SERVER, *LOAD, "sizing"),
        (
            "plan quant=fp8 plan.target=build",
            "plan quant=int4_awq hardware=a10",
            "plan engine=tensorrt_llm model=gemma_2b quant=fp8 hardware=h100_sxm",
        ),
    ),
    "size": Command(
        "pipelines.run.predict_commands:size",
        "how many GPUs and servers a load needs within limits",
        "Finds the fleet that serves a load within latency limits: instances, GPUs, servers, what limits them, what "
        "they cost and what changes the answer. Everything is modelled, or taken from a benchmark of yours.",
        ("sizing", *MODEL, "engine", "build", "triton", "hardware", "workload", "report", "paths"),
        (
            "size sizing.average_rate=5 hardware=h100_sxm model=llama_3_8b",
            "size sizing=chat sizing.users=2000 sizing.requests_per_user_day=20 hardware=l40s model=llama_3_1_8b",
            "size workload.trace=requests.csv hardware=h100_sxm model=llama_3_1_8b",
        ),
    ),
    "simulate": Command(
        "pipelines.run.predict_commands:simulate",
        "static against in-flight batching, in ticks or in seconds",
        "Simulates how an engine schedules requests, in ticks to look at, or in seconds when a GPU or a fit "
        "is named; prints a table and writes pictures, a Perfetto trace and a page that plays it.",
        ("simulator", *LOAD, *MODEL, "engine", "build", "triton", "hardware", "sizing", "paths"),
        (
            "simulate",
            "simulate simulator.policy=[static,inflight] simulator.slots=8",
            "simulate model=llama_3_8b quant=fp8 hardware=h100_sxm benchmark.concurrency=25",
        ),
    ),
    "calibrate": Command(
        "pipelines.predict.performance.calibrate_command:run",
        "fit the performance model to a benchmark of yours",
        "Fits the coefficients of the performance model to a benchmark, prints measured beside modelled, and keeps the "
        "result, which plan, size and simulate then use. (The group `calibration` is another thing: the text that "
        "quantization observes.)",
        ("sizing", "model", "quant", "kv_cache", "build", "triton", "hardware", "paths"),
        (
            "calibrate sizing.measured=results.json",
            "calibrate sizing.measured=artifacts/benchmark/... quant=int4_awq",
            "calibrate sizing.measured=aiperf.json hardware=h100_sxm model=llama_3_1_8b",
        ),
    ),
    "config": Command(
        "pipelines.run.config_command:config",
        "print the configuration, or explain the keys of one group",
        "Prints the whole configuration that overrides give, as YAML. With the name of a group it prints each of its "
        "keys instead: type, allowed values, value now, and what it means. The same through make: make config build.",
        (),
        ("config quant=fp8", "config build", "config sizing sizing=chat"),
        argument="[GROUP]",
    ),
    "doctor": Command(
        "pipelines.doctor.doctor_command:doctor",
        "what this machine has, and what works on it",
        "Examines GPUs, processor, software, folders and the Hub, and says which engines, models and formats work "
        "here and why others do not.",
        (*BUILD, *SERVER, "doctor"),
        ("doctor", "doctor doctor.format=json", "doctor engine=tensorrt_llm quant=fp8"),
        {1: "the configuration given does not run on this machine, or a crash"},
    ),
    "prune": Command(
        "pipelines.run.prune:prune",
        "what each artifact costs; removes what nothing needs",
        "Lists the artifacts of the store with their sizes and why each is kept, and what killed runs left. An "
        "artifact is kept while a running stage or server uses it, while a kept artifact was made from it, while a "
        "link of `stage` leads to it, and for store.keep_days after its last use. It removes the others only with "
        "store.remove=true.",
        ("store", "paths"),
        ("prune", "prune store.keep_days=7", "prune store.keep_days=7 store.remove=true"),
    ),
    "nightly": Command(
        "pipelines.nightly.nightly_command:run",
        "measure a matrix, compare it with its history, name what got worse",
        "Measures every cell of a matrix, adds the results to a history, judges them by the noise of the nights "
        "before, writes a report and names each regression with the commit since which it is there.",
        ("nightly", "paths", "report"),
        ("nightly", "nightly nightly=gpu", "nightly nightly.measure=false nightly.history=/some/folder"),
        {1: "a cell failed, or none could be measured", 3: "something got worse", 4: NOT_MEASURED},
    ),
    "image": Command(
        "pipelines.deploy.commands:image",
        "build the container image; engine=tensorrt_llm or engine=openvino",
        "Builds a container image with docker or podman: NVIDIA's Triton container with this project on top, or a "
        "small one for the CPU engine. Needs a checkout of the project.",
        ("image", "engine"),
        ("image engine=tensorrt_llm", "image engine=openvino image.name=registry/llm", "image image.no_cache=true"),
        {1: "the builder failed (its own exit code), or a crash"},
    ),
    "shell": Command(
        "pipelines.deploy.commands:shell",
        "a shell in the container image, store and caches shared",
        "Opens a shell in the image that `image` builds, with the checkout, the store, the runs and the Hub's cache "
        "mounted. Its exit code is the shell's. Needs a checkout of the project.",
        ("image", "engine", "paths"),
        ("shell engine=tensorrt_llm", "shell image.network=bridge", "shell image.shm_size=16g"),
        {1: "the exit code of the shell, whatever it is"},
    ),
    "manifests": Command(
        "pipelines.deploy.commands:manifests",
        "Kubernetes manifests (Kustomize) for a finished repository",
        "Writes Kustomize files that serve a finished repository: workload, service, autoscaler, storage and probes, "
        "sized from the repository itself.",
        ("manifests", "image", *SERVER, *BUILD),
        (
            "manifests quant=fp8",
            "manifests serving.repository=/its/folder manifests.namespace=llm",
            "manifests manifests=hub manifests.fetch.hub=org/name",
        ),
    ),
    "scripts": Command(
        "pipelines.deploy.commands:scripts",
        "build and serve scripts for Slurm or mpirun",
        "Writes scripts that build the engine and serve it over several nodes, for Slurm or for mpirun over ssh.",
        ("cluster", *BUILD, *SERVER),
        (
            "scripts cluster=slurm engine=tensorrt_llm model=llama_3_1_70b hardware=h100_sxm parallel=tp8_pp2",
            "scripts cluster=mpi cluster.hosts=[n1,n2] serving.repository=/its/folder",
            "scripts cluster=slurm cluster.partition=gpu engine=tensorrt_llm quant=fp8",
        ),
    ),
}

SECTIONS = {
    "Build and evaluate": ("all", "build", "evaluate", "fidelity", "diagnose", "stage", "verify"),
    "Compare and search": ("compare", "sweep", "smallest"),
    "Serve and measure": ("repository", "serve", "benchmark", "report"),
    "Plan and buy": ("plan", "size", "simulate", "calibrate"),
    "Operate": ("doctor", "config", "prune", "nightly", "image", "shell", "manifests", "scripts"),
}
"""The commands in the order of the help."""
