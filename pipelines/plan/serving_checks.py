"""Refuse before anything is spent on serving and measuring: server, repository, engine, load."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import get_args

from eval.config import EvalSettings, FidelitySettings
from eval.spec import is_written
from pipelines.domain.errors import Fault, collecting
from pipelines.domain.families import FAMILIES
from pipelines.engines.config import EngineSettings, options_of_build
from pipelines.engines.openvino.memory import elsewhere_fault
from pipelines.engines.registry import ENGINES, ServerBackend
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.loadgen.config import WorkloadSettings, load_faults
from pipelines.loadgen.plan import mixed_sampler
from pipelines.loadgen.trace import read_trace
from pipelines.plan.accuracy_checks import SEES
from pipelines.plan.deployment import Deployment
from pipelines.plan.targets import EVALUATED, MEASURED, SERVED, STARTED, Target
from pipelines.rules.cpu import DRAFTING
from pipelines.rules.record import either
from pipelines.serving.locate import why_no_key, why_no_server
from pipelines.settings.plain import override
from pipelines.store.sources import BuiltEngine
from triton_repo.config import TritonSettings
from triton_repo.parameters import SPECULATION, setting_faults


def check(d: Deployment) -> list[Fault]:
    """Apply every rule about serving and measuring."""
    settings, target, engine = d.settings, d.target, d.engine
    work, load = settings.workload, settings.benchmark
    faults = [*load_faults(work, load), *_files(work), *_pictures(d)] if target in MEASURED else []
    if (repository := settings.serving.repository) is not None:
        faults.append(
            Fault(
                f"serving.repository='{repository}' exists already: there is nothing to plan for it.",
                "`serve`, `manifests` and `scripts` use it as it is.",
                "Leave it out. To measure it, serve it and give benchmark.url=http://127.0.0.1:9000/v1",
            )
        )
    if d.is_elsewhere:
        return faults
    if target in MEASURED and load.streaming and not settings.triton.decoupled_mode:
        faults.append(_STREAMING)
    asks = d.asks_trtllm_serve
    faults += _trtllm_serve(d) if asks or (target in STARTED and settings.serving.server == "trtllm_serve") else []
    is_named = target in STARTED and settings.serving.tritonserver is not None
    faults += filter(None, [why_no_server(settings.serving)]) if is_named else []
    faults += filter(None, [why_no_key(settings.serving)]) if target == "serve" else []
    if engine.on_device and settings.serving.api_key:
        what = f"serving.api_key=true has no effect on engine={engine.setting}: its server runs on the device."
        faults.append(Fault(what, todo="Leave it out, and add --api-key to the command there."))
    if engine.on_device and target != "build":
        fault = f"engine={settings.engine.name} cannot {target}: {engine.title} runs on the device."
        return [*faults, Fault(fault, "It works with build.", "Use engine=openvino, with the same format.")]
    if target in SERVED and engine.server is None:
        todo = "Use one of these, or serve the same checkpoint with engine=openvino."
        faults.append(_cannot(d, SERVED, "Triton does not serve it here", todo))
    elif target in SERVED or (asks and engine.server is not None):
        faults += setting_faults(_asked(d), engine)
        faults += _devices(d) if engine.server is ServerBackend.TENSORRTLLM else []
    if d.built is not None:
        return [*faults, *_built(settings.engine, d.built, target)]
    return [*faults, *_measured(d)]


def _pictures(d: Deployment) -> Iterator[Fault]:
    """Yield why the pictures of the workload are not seen, are too many, or fill the whole prompt."""
    work, images = d.settings.workload, d.settings.multimodal
    if not work.images or d.settings.benchmark.is_openai:  # an OpenAI endpoint says so itself
        return
    setting = f"workload.images={work.images}"
    if d.picture_tokens is None:
        yield Fault(
            f"{setting}, and {d.settings.model.label} reads text alone.", todo=f"{SEES}, or set workload.images=0."
        )
        return
    if d.engine.server is ServerBackend.TENSORRTLLM and not d.is_elsewhere:
        what = f"{setting} with engine={d.engine.setting}: NVIDIA's preprocessing takes no files or pixels of pictures."
        yield Fault(what, todo="Use engine=openvino, or set workload.images=0.")
        return
    if work.images > images.images_per_request and not d.is_elsewhere:
        yield Fault(
            f"{setting} is more than multimodal.images_per_request={images.images_per_request}, for which"
            " max_multimodal_len has room.",
            todo=f"Set multimodal.images_per_request={work.images}, or fewer images.",
        )
    visual = work.images * d.picture_tokens
    lengths = [part.isl.longest for part in work.parts if part.isl.distribution == "fixed"]
    if (shortest := min(filter(None, lengths), default=None)) is not None and shortest <= visual:
        yield Fault(
            f"workload.isl={shortest} is to contain the {visual} tokens of {setting} and a text.",
            todo=f"Set workload.isl to more than {visual}.",
        )


def _trtllm_serve(d: Deployment) -> Iterator[Fault]:
    """Yield why trtllm-serve cannot be started on what is built."""
    settings = d.settings
    if d.engine.server is not ServerBackend.LLM_API:
        what = f"serving.server=trtllm_serve does not serve engine={d.engine.setting}."
        yield Fault(what, "It serves engine=tensorrt_llm_llmapi.", "Leave out serving.server, or use that.")
    if settings.triton.num_nodes > 1:
        what = (
            f"serving.server=trtllm_serve is started on one machine, but triton.num_nodes={settings.triton.num_nodes}."
        )
        yield Fault(what, todo="Write scripts for several: make scripts cluster=slurm")
    if settings.serving.tritonserver is not None:
        yield Fault("serving.tritonserver has no effect with serving.server=trtllm_serve.", todo="Leave it out.")


def _measured(d: Deployment) -> Iterator[Fault]:
    """Yield why an engine that is built first cannot be evaluated, compared, diagnosed or loaded like that."""
    settings, target, engine = d.settings, d.target, d.engine
    if d.asks_trtllm_serve and engine.server is ServerBackend.LLM_API:
        yield from _not_scored(settings.eval.task)
    elif not engine.evaluates and target in EVALUATED:
        todo = "Evaluate the same format with engine=openvino"
        todo += ", or a task with written answers: make evaluate serving.server=trtllm_serve eval=gsm8k."
        yield _cannot(d, EVALUATED, f"its model runs only inside {engine.title}", todo)
    if target == "fidelity":
        yield from _not_compared(d)
    elif target == "diagnose":
        yield from _not_diagnosed(d)
    if target in MEASURED:
        yield from _load_fits(settings.workload, settings.build, d.positions)


NO_SCORES = "trtllm-serve returns log probabilities of its answers, not of a prompt's tokens"
"""Source: TensorRT-LLM `tests/unittest/api_stability/references/trtllm_serve_api.yaml` @029e223,
`tensorrt_llm/serve/postprocess_handlers.py`."""


def _not_scored(task: str) -> Iterator[Fault]:
    """Refuse a task that trtllm-serve cannot answer, as far as that is known before the task is loaded."""
    if is_written(task) is not False:
        return
    what = f"eval.task='{task}' needs the log probabilities of given texts; {NO_SCORES}."
    works = "It works with tasks whose answers are written: eval=gsm8k, ifeval, mmlu_pro, mini_answers."
    yield Fault(what, works, "Choose one of these, or evaluate the same format with engine=openvino.")


_STREAMING = Fault(
    "benchmark.streaming=true needs a model that sends several responses per request; "
    "triton.decoupled_mode=false sends one.",
    todo="Set benchmark.streaming=false (TTFT and ITL then have no value), or triton.decoupled_mode=true.",
)


def _devices(d: Deployment) -> Iterator[Fault]:
    """Check that every instance of the model has one GPU and one process per rank of the engine."""
    triton, hardware = d.settings.triton, d.settings.hardware
    by, most = d.settings.build, hardware.gpus_per_server
    ranks = by.tp_size * by.pp_size
    for key in ("gpu_device_ids", "draft_gpu_device_ids", "participant_ids"):
        groups = getattr(triton, key) or ()
        stated = f"triton.{key}={[list(group) for group in groups]}".replace(" ", "")
        # nodes number their GPUs alike
        twice = [group for group in groups if len(set(group)) < len(group) and triton.num_nodes == 1]
        if twice or any(len(group) != ranks for group in groups):
            yield Fault(
                f"{stated} does not fit an engine of {ranks} rank(s) (tp_size={by.tp_size}, pp_size={by.pp_size}).",
                f"Each instance has {ranks} different number(s).",
                f"Change triton.{key}, or the ranks.",
            )
        elif key != "participant_ids" and most and any(gpu >= most for group in groups for gpu in group):
            yield Fault(
                f"{stated} names a GPU that a server with {hardware.name} does not have.",
                f"hardware.gpus_per_server={most}, numbered from 0.",
                f"Change triton.{key}, or set hardware.gpus_per_server.",
            )


def _files(work: WorkloadSettings) -> list[Fault]:
    faults = list[Fault]()
    if work.trace is not None:
        with collecting(faults):
            read_trace(work)
    with collecting(faults):
        mixed_sampler(work, Random(work.seed))
    return faults


def _asked(d: Deployment) -> TritonSettings:
    """Return the Triton parameters to check, without those of a kind of speculation that is refused anyway."""
    mode, triton = d.settings.speculative.mode, d.settings.triton
    if d.engine.server is not ServerBackend.PYTHON or d.built is not None or mode in DRAFTING:
        return triton
    names = (*SPECULATION, "decoding_mode") if triton.decoding_mode == mode else SPECULATION
    return triton.model_copy(update={name: TritonSettings.model_fields[name].default for name in names})


def _cannot(d: Deployment, refused: Sequence[Target], why: str, todo: str) -> Fault:
    """Refuse a target for an engine, and list the targets that are left to it."""
    able = {"fidelity": d.engine.gives_logits, "diagnose": d.engine.writes_engine}
    works = ", ".join(each for each in get_args(Target) if each not in refused and able.get(each, True))
    return Fault(f"engine={d.settings.engine.name} cannot {d.target}: {why}.", f"It works with {works}.", todo)


def _not_compared(d: Deployment) -> Iterator[Fault]:
    """Refuse to compare predictions where an engine does not give them, or with nothing."""
    settings, engine = d.settings, d.engine
    if not engine.gives_logits:
        by_server = f" ({NO_SCORES})" if engine.server is ServerBackend.LLM_API else ""
        yield Fault(
            f"The fidelity of engine={engine.setting} cannot be measured: it does not give the logits after every "
            f"token of a text{by_server}.",
            f"Engines that do: {', '.join(each.setting for each in ENGINES.values() if each.gives_logits)}.",
            "Measure the same format with engine=openvino, which executes the same checkpoint.",
        )
    if settings.eval.url is not None:
        yield from _not_bounded(settings.eval, settings.fidelity)
        return
    if settings.fidelity.reference_path is None and not settings.is_compressed:
        yield Fault(
            "quant=none is the 16-bit model itself, so there is nothing to compare it with.",
            todo="Give a format, e.g. quant=fp8, or another model: fidelity.reference_path=/its/folder",
        )


def _not_bounded(server: EvalSettings, fidelity: FidelitySettings) -> Iterator[Fault]:
    """Refuse measures that a server's answers cannot give."""
    url = server.url
    if server.asks_triton:
        yield Fault(
            f"eval.url='{url}' is a Triton server's; fidelity asks for log probabilities over /v1/completions.",
            todo="Give an OpenAI-compatible server: eval.url=http://host:8000/v1",
        )
    if fidelity.by_layer:
        yield Fault(
            f"fidelity.by_layer=true with eval.url='{url}': a server does not give the outputs of its layers.",
            todo="Leave out fidelity.by_layer, or measure the same format here, without eval.url.",
        )
    if fidelity.reference_path is not None:
        yield Fault(
            f"fidelity.reference_path='{fidelity.reference_path}' with eval.url='{url}': the server is compared"
            " with only one model, that of model=... in 16 bit.",
            todo=f"Give it as {override('model.path', fidelity.reference_path)} instead.",
        )


def _not_diagnosed(d: Deployment) -> Iterator[Fault]:
    """Refuse to diagnose what has no TensorRT-LLM checkpoint, or a server that cannot be started."""
    settings, engine, diagnose = d.settings, d.engine, d.settings.diagnose
    if not engine.writes_engine and not diagnose.given:
        yield Fault(
            f"engine={engine.setting} has no TensorRT-LLM checkpoint, which `diagnose` reads.",
            todo="Diagnose the same format with engine=openvino.",
        )
    if d.shape is not None and d.shape.family.modelopt_type is None:
        read = either([family.title for family in FAMILIES.values() if family.modelopt_type], "and")
        yield Fault(
            f"`diagnose` does not read the layers of {d.shape.architecture}.",
            f"It compares those of {read}.",
            "Use `make fidelity`, which compares predictions alone.",
        )
    if diagnose.engine is not None and diagnose.checkpoint is None:
        yield Fault(
            f"diagnose.engine='{diagnose.engine}' needs diagnose.checkpoint.",
            "An engine is compared with the checkpoint that it was built from.",
            "Give diagnose.checkpoint=FOLDER as well.",
        )
    if diagnose.repository is not None and settings.eval.url is not None:
        yield Fault(
            f"diagnose.repository='{diagnose.repository}' and eval.url='{settings.eval.url}' cannot be combined.",
            "Only one server is diagnosed.",
            "Leave one out.",
        )
    starts = diagnose.repository is not None if diagnose.given else engine.gives_logits
    starts = starts and diagnose.serve and settings.eval.url is None
    if starts and (fault := why_no_server(settings.serving)):
        yield Fault(fault.message, fault.allowed, f"{fault.todo} Or leave it out: diagnose.serve=false")


def _built(engine: EngineSettings, built: BuiltEngine, target: Target) -> Iterator[Fault]:
    if engine.name not in ("auto", built.flavour):
        yield Fault(
            f"engine={engine.name} is set, but engine.path='{engine.path}' is an engine of {built.flavour}.",
            todo=f"Give engine={built.flavour}.",
        )
    for key in sorted(options_of_build(engine.openvino)):
        yield Fault(
            f"engine.openvino.{key}={getattr(engine.openvino, key)} is asked of an engine that is built:"
            f" engine.path='{engine.path}'.",
            "It changes what is built.",
            "Leave it out, or leave engine.path out to build an engine with it.",
        )
    here = target in STARTED or engine.openvino.inference_precision == "f32"  # a repository may be for another machine
    if built.grouped_experts and here and (fault := elsewhere_fault(engine.path, engine.openvino)):
        yield fault
    if target in ("build", "fidelity", "diagnose") or target in EVALUATED:
        yield Fault(
            f"engine.path='{engine.path}' is already built; `{target}` starts from a model.",
            "It works with repository, serve and benchmark.",
            "Leave out engine.path, or use one of these.",
        )


def _load_fits(work: WorkloadSettings, build: BuildSettings, positions: int | None) -> Iterator[Fault]:
    """Check the longest request of the workload against the engine's limits; unbounded lengths pass."""
    bounds = [(part.isl.longest, part.osl.longest) for part in work.parts]
    lengths = [(isl, osl) for isl, osl in bounds if isl is not None and osl is not None]
    if not lengths or work.arrival == "trace":
        return
    isl, osl = max(lengths, key=lambda pair: work.turns * sum(pair))
    prompt = work.turns * isl + (work.turns - 1) * osl
    limit = build.max_seq_len or positions
    demand = f"workload={work.name} asks for prompts of up to {prompt} token{'' if prompt == 1 else 's'}"
    demand += f" in {work.turns} turns" if work.turns > 1 else ""
    if limit is not None and prompt + osl > limit:
        longer = positions is None or prompt + osl <= positions
        todo = "Shorten workload.isl or workload.osl"
        todo += f", or set build.max_seq_len={prompt + osl} or more." if longer else ": the model reads no more."
        yield Fault(f"{demand} and {osl} of output; the engine holds max_seq_len={limit}.", todo=todo)
        return
    if prompt > build.max_input_len:
        todo = f"Shorten workload.isl, or set build.max_input_len={prompt} or more."
        yield Fault(f"{demand}; the engine is built with max_input_len={build.max_input_len}.", todo=todo)
        return
