"""The table of commands. Standard library only, so that help needs nothing that `make setup` installs."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

PROGRAM = "trtllm-pipelines"

EXITS = {
    0: "done",
    1: "a crash; its traceback is in the run's log",
    2: "invalid input: an override, a value, a file, or something this machine lacks",
    130: "interrupted by Ctrl-C, SIGTERM or a closed terminal",
}
"""Exit codes of every command."""

MODEL = ("model", "quant", "prune", "sparsity", "recover", "kv_cache", "calibration")
ENGINE = ("engine", "build", "runtime", "lora", "speculative", "multimodal", "hardware")
PRESETS = ("experiment", "parallel", "window", "weights", "reuse", "guided")
"""Groups without their own keys: each choice sets keys of other groups."""
SERVER = ("triton", "serving")
LOAD = ("workload", "benchmark")
BUILD = (*MODEL, *ENGINE, *PRESETS, "paths")


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        function: "module:function"; it takes the overrides and returns the exit code.
        summary: one line for the list of commands.
        about: description in a few sentences.
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


NOT_MEASURED = "NOT MEASURED: the baseline does not beat guessing, or had no questions, so no loss could be measured"
CELL_FAILED = "a cell failed; the others are finished and kept"
INCOMPLETE = "the benchmark is incomplete, or a crash; finished loads are kept"

COMMANDS = {
    "all": Command(
        "pipelines.run.commands:run_all",
        "everything: engine, accuracy, repository, server, benchmark, report",
        "Runs the whole pipeline: downloads or reads the model, quantizes it, builds the engine, measures accuracy and "
        "fidelity against the 16-bit baseline, writes the Triton repository, serves and benchmarks it, and writes "
        "the report. Cached stages are skipped.",
        (*BUILD, "eval", "fidelity", *SERVER, *LOAD, "report"),
        ("all quant=int4_awq", "all model=tiny_llama quant=fp8 kv_cache=fp8", "all experiment=cpu_demo"),
        {1: INCOMPLETE, 4: NOT_MEASURED},
    ),
    "build": Command(
        "pipelines.run.commands:build",
        "model -> quantized TensorRT-LLM checkpoint -> engine",
        "Downloads or reads the model, optionally prunes, sparsifies and trains it, quantizes it to a TensorRT-LLM "
        "checkpoint and builds the engine. Cached stages are skipped.",
        BUILD,
        (
            "build quant=int4_awq",
            "build model=gemma_2b quant=fp8 build.max_batch_size=64",
            "build model.path=/models/my-llama quant=int8_sq",
        ),
    ),
    "evaluate": Command(
        "pipelines.run.commands:evaluate",
        "build, then accuracy against the 16-bit baseline",
        "Builds the engine and its 16-bit baseline, runs the task on both, and shows the two accuracies with a verdict "
        "on the loss: GO, NO-GO, UNDECIDED or NOT MEASURED. "
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
        "build, then compare predictions with the 16-bit model's",
        "Builds the engine and its 16-bit baseline, runs both on the same texts, and shows how far their next-token "
        "probabilities differ, next to the noise of the 16-bit model itself. It takes a minute and asks no questions: "
        "it detects damage; `evaluate` decides whether a format is good enough. With eval.url it gives bounds for a "
        "running server.",
        (*BUILD, "fidelity", "eval"),
        (
            "fidelity quant=int4_awq fidelity.path=/my/texts.jsonl",
            "fidelity quant=int4_wo fidelity.by_layer=true",
            "fidelity eval.url=http://host:8000/v1",
        ),
    ),
    "diagnose": Command(
        "pipelines.run.commands:diagnose",
        "find the faulty stage, layer and tensor",
        "Runs the same prompts through every stage: the model in Transformers, the checkpoint, the engine, Triton's "
        "models and the OpenAI-compatible service. It names the first stage that differs from the previous one by more "
        "than the noise, with the layer, the tensor and the probable cause. eval.url adds a running server.",
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
        "Runs `all` for each combination of comma-separated values, one after the other or with a launcher, then "
        "prints one table and writes one report per model.",
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
        "several settings side by side: accuracy only",
        "Evaluates each combination of comma-separated values, one after the other or with a launcher, and prints one "
        "table of accuracies.",
        (*BUILD, "eval", "hydra/launcher"),
        (
            "sweep quant=fp8,int8_sq,int4_awq",
            "sweep quant=none sparsity=magnitude_2_4,sparsegpt_2_4",
            "sweep quant=fp8,int8_sq hydra/launcher=joblib",
        ),
        {1: CELL_FAILED, 4: NOT_MEASURED},
    ),
    "smallest": Command(
        "pipelines.sweep.sweep_command:smallest",
        "the mix of formats with the fewest bits per weight that is still GO",
        "Bisects the bits per weight of quant=auto, most bits first, and evaluates each mix. It prints the values "
        "tried and the command that builds the smallest mix whose loss is proven to be below eval.margin_points.",
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
        "one stage of the plan with its inputs, and a link to its result",
        "Runs only one of the stages that `plan` lists, and its inputs: to quantize on a machine without a GPU, for "
        "example. stage.link=NAME creates a link to the result.",
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
        "check every byte of the store, an artifact or a checkpoint",
        "Without overrides, reads every artifact of the store from the disk, compares it with its manifest, and lists "
        "damage and the commands that rebuild it. With a folder, or a configuration (its checkpoint), it checks one "
        "artifact. For a TensorRT-LLM checkpoint it also lists the tensors and checks names, types, shapes and scales "
        "against the rules of its format.",
        (*BUILD, "verify"),
        ("verify", "verify verify.path=/some/checkpoint", "verify model=tiny_llama quant=fp8"),
        {2: "damage, a checkpoint that is faulty or missing, or invalid input"},
    ),
    "repository": Command(
        "pipelines.run.commands:repository",
        "engine -> Triton model repository, a folder that can be copied",
        "Builds the engine and writes a Triton model repository around it: preprocessing, engine, postprocessing, "
        "ensemble and BLS. The folder contains everything a server needs.",
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
        "Builds missing artifacts and starts tritonserver on the repository. Ctrl-C shuts down gracefully: running "
        "requests finish first. A second Ctrl-C aborts them.",
        (*BUILD, *SERVER),
        (
            "serve quant=int4_awq",
            "serve triton=openai serving.openai=true",
            "serve serving.repository=/copied/repository serving.http_port=8000",
        ),
        {
            0: "drained",
            1: "the server exited by itself, or a crash",
            130: "interrupted before it was ready, or a second time",
        },
    ),
    "benchmark": Command(
        "pipelines.run.commands:benchmark",
        "serve and measure; benchmark.url=... for a running server",
        "Starts a server on the engine, or uses a running one, sends it the workload at each load and records TTFT, "
        "ITL, E2E latency, throughput and goodput.",
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
        "Markdown and one HTML file from the results in the store",
        "Writes the report of a model from the results in the store: formats, accuracy, sizes, loads and pictures. It "
        "measures nothing.",
        ("model", "report", "eval", "paths"),
        ("report", "report model=tiny_llama", "report eval.margin_points=0.5 report.max_accuracy_loss_percent=0.5"),
    ),
    "plan": Command(
        "pipelines.run.commands:plan",
        "what would run, what is cached and why; writes nothing",
        "Checks the whole configuration and this machine, and lists each stage: cached or not and why, its memory, and "
        "for a GPU the exact commands and the modelled speed.",
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
        "Finds the fleet that serves a load within latency limits: instances, GPUs, servers, the bottleneck, the cost "
        "and the effect of changes. Everything is modelled, or taken from your own benchmark.",
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
        "Simulates an engine's scheduler in ticks, or in seconds if a GPU or a fit is named; prints a table and writes "
        "pictures, a Perfetto trace and an animated page.",
        ("simulator", *LOAD, *MODEL, "engine", "build", "triton", "hardware", "sizing", "paths"),
        (
            "simulate",
            "simulate simulator.policy=[static,inflight] simulator.slots=8",
            "simulate model=llama_3_8b quant=fp8 hardware=h100_sxm benchmark.concurrency=25",
        ),
    ),
    "calibrate": Command(
        "pipelines.predict.performance.calibrate_command:run",
        "fit the performance model to your own benchmark",
        "Fits the coefficients of the performance model to a benchmark, prints measured next to modelled values, and "
        "saves the fit for plan, size and simulate. (Unrelated to the group `calibration`, the text on which "
        "quantization is calibrated.)",
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
        "Prints the resolved configuration as YAML, with what decides each value if conf/ does not. With the name of a "
        "group it explains each key instead: type, allowed values, current value and meaning.",
        (),
        ("config quant=fp8", "config build", "config sizing sizing=chat"),
        argument="[GROUP]",
    ),
    "init": Command(
        "pipelines.run.config_command:init",
        "write a project's own settings: pipelines.yaml",
        "Writes pipelines.yaml with comments, and with the settings given. Its settings apply to every command in that "
        "folder and below, unless the command line decides otherwise.",
        (),
        ("init", "init model=tiny_llama quant=int4_awq", "init config=team.yaml build.max_batch_size=64"),
    ),
    "doctor": Command(
        "pipelines.doctor.doctor_command:doctor",
        "what this machine has, and what works on it",
        "Checks GPUs, processor, software, folders and the Hub, and reports which engines, models and formats work "
        "here and why others do not.",
        (*BUILD, *SERVER, "doctor"),
        ("doctor", "doctor doctor.format=json", "doctor engine=tensorrt_llm quant=fp8"),
        {1: "this configuration does not run on this machine, or a crash"},
    ),
    "prune": Command(
        "pipelines.run.prune:prune",
        "list artifacts with their sizes; remove unneeded ones",
        "Lists the artifacts of the store with their sizes and why each is kept, and the leftovers of killed runs. An "
        "artifact is kept while a running stage or server uses it, while a kept artifact was made from it, while a "
        "link of `stage` points to it, and for store.keep_days after its last use. The others are removed only with "
        "store.remove=true.",
        ("store", "paths"),
        ("prune", "prune store.keep_days=7", "prune store.keep_days=7 store.remove=true"),
    ),
    "nightly": Command(
        "pipelines.nightly.nightly_command:run",
        "measure a matrix, compare it with its history, report regressions",
        "Measures every cell of a matrix, adds the results to a history, judges them by the noise of earlier nights, "
        "writes a report and names the first bad commit of each regression.",
        ("nightly", "paths", "report"),
        ("nightly", "nightly nightly=gpu", "nightly nightly.measure=false nightly.history=/some/folder"),
        {1: "a cell failed, or none could be measured", 3: "something got worse", 4: NOT_MEASURED},
    ),
    "image": Command(
        "pipelines.deploy.commands:image",
        "build the container image; engine=tensorrt_llm or engine=openvino",
        "Builds a container image with docker or podman: NVIDIA's Triton container with this project on top, or a "
        "small image for the CPU engine. Needs a checkout of the project.",
        ("image", "engine"),
        ("image engine=tensorrt_llm", "image engine=openvino image.name=registry/llm", "image image.no_cache=true"),
        {1: "the builder failed (its own exit code), or a crash"},
    ),
    "shell": Command(
        "pipelines.deploy.commands:shell",
        "a shell in the container image, with store and caches mounted",
        "Opens a shell in the image that `image` builds, with the checkout, the store, the runs and the Hub's cache "
        "mounted. Its exit code is the shell's. Needs a checkout of the project.",
        ("image", "engine", "paths"),
        ("shell engine=tensorrt_llm", "shell image.network=bridge", "shell image.shm_size=16g"),
        {1: "the exit code of the shell, whatever it is"},
    ),
    "manifests": Command(
        "pipelines.deploy.commands:manifests",
        "Kubernetes manifests (Kustomize) for a finished repository",
        "Writes Kustomize files for a finished repository: workload, service, autoscaler, storage and probes, sized "
        "from the repository itself.",
        ("manifests", "image", *SERVER, *BUILD),
        (
            "manifests quant=fp8",
            "manifests serving.repository=/its/folder manifests.namespace=llm",
            "manifests manifests=hub manifests.fetch.hub=org/name",
        ),
    ),
    "migrate": Command(
        "pipelines.deploy.migrate.migrate_command:migrate",
        "a TensorRT-LLM 1.2 deployment in the words of the LLM API",
        "Reads a deployment of TensorRT-LLM 1.2 (an engine folder, a Triton repository, a build script, a trtllm-build "
        "command, or these settings) and writes the options of the LLM API, a script for trtllm-serve, and a page: "
        "what is kept, renamed and lost, and what to take instead with its measured cost.",
        ("migrate", *BUILD, *SERVER),
        (
            "migrate migrate.path=/its/engine hardware=a10",
            "migrate migrate.path=/its/triton_repository model=llama_3_8b",
            "migrate engine=tensorrt_llm model=llama_3_1_8b quant=int8_sq hardware=h100_sxm",
        ),
    ),
    "scripts": Command(
        "pipelines.deploy.commands:scripts",
        "build and serve scripts for Slurm or mpirun",
        "Writes scripts that build the engine and serve it on several nodes, for Slurm or for mpirun over ssh.",
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
    "Operate": ("doctor", "config", "init", "prune", "nightly", "image", "shell", "manifests", "scripts", "migrate"),
}
"""The commands in the order of the help."""
