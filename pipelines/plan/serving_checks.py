"""Refuse before anything is spent on serving and measuring: server, repository, engine, load."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import get_args

from pipelines.domain.errors import Fault, collecting
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import ENGINES, EngineDescription, ServerBackend
from pipelines.loadgen.config import load_faults
from pipelines.loadgen.plan import read_trace, sampler
from pipelines.plan.targets import EVALUATED, MEASURED, SERVED, STARTED, Target, is_elsewhere
from pipelines.rules.cpu import DRAFTING
from pipelines.serving.locate import why_no_server
from pipelines.serving.ports import privileged_ports
from pipelines.settings.root import Settings
from pipelines.store.sources import BuiltEngine
from triton_repo.config import TritonSettings
from triton_repo.parameters import SPECULATION, setting_faults


def check(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, target: Target, built: BuiltEngine | None
) -> list[Fault]:
    """Apply every rule about serving.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        engine: the chosen engine.
        target: of the command.
        built: the engine given with engine.path, if any.
    """
    faults = [*load_faults(settings.workload, settings.benchmark), *_files(settings)] if target in MEASURED else []
    if is_elsewhere(settings, target):
        return faults
    if target in MEASURED:
        faults += _streaming(settings)
    faults += _program(settings) if target in STARTED else []
    if target in SERVED and engine.server is None:
        faults.append(_not_served(settings, target, engine))
    elif target in SERVED:
        faults += setting_faults(_asked(settings, engine, built), engine)
        faults += _devices(settings, built) if engine.server is ServerBackend.TENSORRTLLM else []
    if built is not None:
        return faults + _built(settings, built, target)
    if not engine.evaluates and target in EVALUATED:
        faults.append(_not_evaluated(settings, engine, target))
    more = {"fidelity": _not_compared, "diagnose": _not_diagnosed}.get(target)
    if more is not None:
        faults += more(settings, engine)
    if target in MEASURED:
        faults += _load_fits(settings, shape)
    return faults


def _program(settings: Settings) -> list[Fault]:
    """Check the ports and the program of a server that is started here."""
    faults = privileged_ports(settings.serving)
    if settings.serving.tritonserver is not None and (fault := why_no_server(settings.serving)):
        faults.append(fault)
    return faults


def _devices(settings: Settings, built: BuiltEngine | None) -> list[Fault]:
    """Check that every instance of the model has one GPU and one process per rank of the engine."""
    triton, most, faults = settings.triton, settings.hardware.gpus_per_server, list[Fault]()
    by = built or settings.build
    ranks = by.tp_size * by.pp_size
    for key in ("gpu_device_ids", "draft_gpu_device_ids", "participant_ids"):
        groups = getattr(triton, key) or ()
        shown = f"triton.{key}={[list(group) for group in groups]}".replace(" ", "")
        # nodes number their GPUs alike
        twice = [group for group in groups if len(set(group)) < len(group) and triton.num_nodes == 1]
        if twice or any(len(group) != ranks for group in groups):
            faults.append(
                Fault(
                    f"{shown} does not fit an engine of {ranks} rank(s) (tp_size={by.tp_size}, pp_size={by.pp_size}).",
                    f"Each instance has {ranks} different number(s).",
                    f"Change triton.{key}, or the ranks.",
                )
            )
        elif key != "participant_ids" and most and any(gpu >= most for group in groups for gpu in group):
            faults.append(
                Fault(
                    f"{shown} names a GPU that a server with {settings.hardware.name} does not have.",
                    f"hardware.gpus_per_server={most}, numbered from 0.",
                    f"Change triton.{key}, or set hardware.gpus_per_server.",
                )
            )
    return faults


def _files(settings: Settings) -> list[Fault]:
    """Read the files of the workload: its trace, and lengths given as a file."""
    work, faults = settings.workload, list[Fault]()
    if work.trace is not None:
        with collecting(faults):
            read_trace(work.trace, work.trace_speed)
    for key, length in (("workload.isl", work.isl), ("workload.osl", work.osl)):
        with collecting(faults):
            sampler(length, Random(work.seed), key=key)
    return faults


def _streaming(settings: Settings) -> list[Fault]:
    """Refuse to stream from a model that gives one response per request."""
    if not settings.benchmark.streaming or settings.triton.decoupled_mode:
        return []
    return [
        Fault(
            "benchmark.streaming=true needs a model that sends several responses per request; "
            "triton.decoupled_mode=false sends one.",
            todo="Set benchmark.streaming=false (TTFT and ITL then have no value), or triton.decoupled_mode=true.",
        )
    ]


def _asked(settings: Settings, engine: EngineDescription, built: BuiltEngine | None) -> TritonSettings:
    """Return the Triton parameters to check, without those of a kind of speculation that is refused anyway."""
    mode = settings.speculative.mode
    if engine.server is not ServerBackend.PYTHON or built is not None or mode in DRAFTING:
        return settings.triton
    names = (*SPECULATION, "decoding_mode") if settings.triton.decoding_mode == mode else SPECULATION
    usual = {name: TritonSettings.model_fields[name].default for name in names}
    return settings.triton.model_copy(update=usual)


def _not_served(settings: Settings, target: Target, engine: EngineDescription) -> Fault:
    """Refuse targets that serve, for an engine that Triton cannot serve here."""
    return Fault(
        f"engine={settings.engine.name} cannot {target}: Triton does not serve it here.",
        _goes_with(SERVED, engine),
        "Use one of these, or serve the same checkpoint with engine=openvino.",
    )


def _goes_with(refused: Sequence[Target], engine: EngineDescription) -> str:
    """List the targets that are left to an engine."""
    left = [target for target in get_args(Target) if target not in refused]
    return f"It goes with {', '.join(each for each in left if each != 'fidelity' or engine.gives_logits)}."


def _not_evaluated(settings: Settings, engine: EngineDescription, target: Target) -> Fault:
    """The engine's accuracy cannot be measured from here."""
    return Fault(
        f"engine={settings.engine.name} cannot {target}: its model runs only inside {engine.title}.",
        _goes_with(EVALUATED, engine),
        "Evaluate the same format with engine=openvino, or on the GPU machine with trtllm-eval.",
    )


def _not_compared(settings: Settings, engine: EngineDescription) -> list[Fault]:
    """Refuse to compare predictions where an engine does not give them, or with nothing."""
    faults = []
    if not engine.gives_logits:
        faults.append(
            Fault(
                f"The fidelity of engine={engine.setting} cannot be measured: it does not give the logits after every "
                "token of a text.",
                f"Engines that do: {', '.join(each.setting for each in ENGINES.values() if each.gives_logits)}.",
                "Measure the same format with engine=openvino, which computes what the checkpoint says.",
            )
        )
    if settings.eval.url is not None:
        return faults + _not_bounded(settings)
    if settings.fidelity.reference_path is None and settings.baseline().variant == settings.variant:
        faults.append(
            Fault(
                "quant=none is the 16-bit model itself, so there is nothing to compare it with.",
                todo="Give a format, e.g. quant=fp8, or another model: fidelity.reference_path=/its/folder",
            )
        )
    return faults


def _not_bounded(settings: Settings) -> list[Fault]:
    """Refuse what is not known of a server's predictions."""
    asked, url = settings.fidelity, settings.eval.url
    faults = []
    if settings.eval.asks_triton:
        faults.append(
            Fault(
                f"eval.url='{url}' is a Triton server's; fidelity asks for log probabilities over /v1/completions.",
                todo="Give an OpenAI-compatible server: eval.url=http://host:8000/v1",
            )
        )
    if asked.by_layer:
        faults.append(
            Fault(
                f"fidelity.by_layer=true with eval.url='{url}': a server does not give the outputs of its layers.",
                todo="Leave out fidelity.by_layer, or measure the same format here, without eval.url.",
            )
        )
    if asked.reference_path is not None:
        faults.append(
            Fault(
                f"fidelity.reference_path='{asked.reference_path}' with eval.url='{url}': what is served is compared"
                " with one model, that of model=... in 16 bit.",
                todo=f"Give it as model.path={asked.reference_path} instead.",
            )
        )
    return faults


def _not_diagnosed(settings: Settings, engine: EngineDescription) -> list[Fault]:
    """Refuse to diagnose what has no TensorRT-LLM checkpoint, or a server that cannot be started."""
    asked, faults = settings.diagnose, []
    if not engine.writes_engine and not asked.given:
        faults.append(
            Fault(
                f"engine={engine.setting} has no TensorRT-LLM checkpoint, which `diagnose` reads.",
                todo="Diagnose the same format with engine=openvino.",
            )
        )
    if asked.engine is not None and asked.checkpoint is None:
        faults.append(
            Fault(
                f"diagnose.engine='{asked.engine}' was given without diagnose.checkpoint.",
                "An engine is compared with the checkpoint that it was built from.",
                "Give diagnose.checkpoint=FOLDER as well.",
            )
        )
    if asked.repository is not None and settings.eval.url is not None:
        faults.append(
            Fault(
                f"diagnose.repository='{asked.repository}' and eval.url='{settings.eval.url}' were both given.",
                "One server is asked.",
                "Leave one out.",
            )
        )
    starts = asked.repository is not None if asked.given else engine.gives_logits
    starts = starts and asked.serve and settings.eval.url is None
    if starts and (fault := why_no_server(settings.serving)):
        faults.append(Fault(fault.message, fault.allowed, f"{fault.todo} Or leave it out: diagnose.serve=false"))
    return faults


def _built(settings: Settings, built: BuiltEngine, target: Target) -> list[Fault]:
    """Refuse what cannot be done with an engine that is already built."""
    faults = []
    if settings.engine.name not in ("auto", built.flavour):
        faults.append(
            Fault(
                f"engine={settings.engine.name} was asked for; engine.path='{settings.engine.path}' is an engine of "
                f"{built.flavour}.",
                todo=f"Give engine={built.flavour}.",
            )
        )
    if target in ("build", "fidelity", "diagnose") or target in EVALUATED:
        faults.append(
            Fault(
                f"engine.path='{settings.engine.path}' is already built; `{target}` starts from a model.",
                "It goes with repository, serve and benchmark.",
                "Leave out engine.path, or use one of these.",
            )
        )
    return faults


def _load_fits(settings: Settings, shape: ModelShape | None) -> list[Fault]:
    """Check the longest request of the workload against the engine's limits; unbounded lengths pass."""
    work, build = settings.workload, settings.build
    isl, osl = work.isl.longest, work.osl.longest
    if isl is None or osl is None or work.arrival == "trace":
        return []
    prompt = work.turns * isl + (work.turns - 1) * osl
    limit = build.max_seq_len or (shape.max_position_embeddings if shape else None)
    words = f"workload={work.name} asks for prompts of up to {prompt} token{'' if prompt == 1 else 's'}"
    words += f" in {work.turns} turns" if work.turns > 1 else ""
    if limit is not None and prompt + osl > limit:
        longer = shape is None or prompt + osl <= shape.max_position_embeddings
        todo = "Shorten workload.isl or workload.osl"
        todo += f", or set build.max_seq_len={prompt + osl} or more." if longer else ": the model reads no more."
        return [Fault(f"{words} and {osl} of output; the engine holds max_seq_len={limit}.", todo=todo)]
    if prompt > build.max_input_len:
        todo = f"Shorten workload.isl, or set build.max_input_len={prompt} or more."
        return [Fault(f"{words}; the engine is built with max_input_len={build.max_input_len}.", todo=todo)]
    return []
