"""Engine folders of trtllm-build: compare one with the request, and record the machine it belongs to."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.document.show import count
from pipelines.domain.errors import Fault
from pipelines.engines.limits import SIZES
from pipelines.engines.port import BuildLimits
from pipelines.engines.tensorrt_llm.config import DECIDED, FLAG, LIST, OPTIONS, BuildOption, BuildSettings
from pipelines.host.files import MANIFEST
from pipelines.host.machine import gather, library_versions

# How an installed trtllm-build differs from the table of its options.

INVOCATION = re.compile(r"^ {2}(-{1,2}\w.*?)(?: {2,}\S.*)?$")
CHOICES = re.compile(r"\{([^}]*)\}")
DEFAULT = re.compile(r"\(default: ([^)]*)\)")
STANDARD = ("-h", "--help")
REPORT = "Report it to this project, with the program's --help and version."


@dataclass(frozen=True, slots=True)
class OptionInHelp:
    """An option as described by a program's help: choices and default, empty if it lists none."""

    choices: tuple[str, ...]
    default: str


def help_differences(help_text: str) -> list[Fault]:
    """Compare `trtllm-build --help` with the table: options, spellings, missing choices, defaults.

    Returns:
        a fault for every difference; an empty list if the program matches the table.
    """
    here = described(help_text)
    if not here:
        return [
            Fault(
                "This is not the help of trtllm-build: it contains no options.",
                todo="Pass the output of: trtllm-build --help",
            )
        ]
    table = {name: option for option in OPTIONS.values() for name in (option.name, *option.aliases)}
    gone = [Fault(f"This trtllm-build lacks {name}.", "1.2 has it.", REPORT) for name in table if name not in here]
    new = [Fault(f"This trtllm-build has {name}, which 1.2 lacks.", todo=REPORT) for name in here if name not in table]
    return [*gone, *new, *(fault for name in table if name in here for fault in _differs(table[name], here[name]))]


def extra_choices(help_text: str) -> list[str]:
    """Describe the choices in a program's help that the table lacks; every setting works without them."""
    here = described(help_text)
    table = {option.name: option.choices for option in OPTIONS.values() if option.choices and option.name in here}
    extra = {name: sorted(set(here[name].choices) - set(choices)) for name, choices in table.items()}
    return [f"{name} also accepts {', '.join(new)}" for name, new in extra.items() if new]


def _differs(option: BuildOption, here: OptionInHelp) -> Iterator[Fault]:
    in_1_2 = [choice for choice in option.choices or () if choice not in option.later_choices]
    if here.choices and not set(in_1_2) <= set(here.choices):
        now, then = ", ".join(here.choices), ", ".join(in_1_2)
        yield Fault(f"This trtllm-build accepts {option.name} {{{now}}}.", f"In 1.2 it accepts {{{then}}}.", REPORT)
    if here.default and here.default != str(option.default):
        yield Fault(
            f"The default of {option.name} in this trtllm-build is {here.default}.",
            f"In 1.2 it is {option.default}, and values equal to the default are not passed on the command line.",
            REPORT,
        )


def described(help_text: str) -> dict[str, OptionInHelp]:
    """Return the options in an argparse help, by every spelling; empty for any other text."""
    blocks: list[tuple[str, list[str]]] = []
    for line in help_text.splitlines():
        if match := INVOCATION.match(line):
            blocks.append((match.group(1), [line]))
        elif blocks:
            blocks[-1][1].append(line.strip())
    options: dict[str, OptionInHelp] = {}
    for invocation, lines in blocks:
        listed, default = CHOICES.search(invocation), DEFAULT.search(" ".join(lines))
        choices = tuple(word.strip() for word in listed.group(1).split(",")) if listed else ()
        for name in re.findall(r"(?:^|, )(--?[\w-]+)", CHOICES.sub("", invocation)):
            if name not in STANDARD:
                options[name] = OptionInHelp(choices, default.group(1) if default else "")
    return options


# The exact trtllm-build command: the limits, and every option that differs from trtllm-build's default.
#
# INT8 and INT4 weight-only need no option: the checkpoint's config.json specifies W8A16 or W4A16 and the checkpoint
# holds 16-bit weights, which trtllm-build quantizes (TensorRT-LLM 1.2 `modeling_utils.py`, `preprocess_weights`).

PROGRAM = "trtllm-build"
NO_BYTES = ("workers", "log_level", "monitor_memory")
"""Options that affect how a build runs but not its output."""

Part = tuple[str, ...]
"""One option with its values."""


@dataclass(frozen=True, slots=True)
class BuildPaths:
    """Paths that a build reads and writes.

    Attributes:
        checkpoint: folder of the TensorRT-LLM checkpoint.
        timing_in: timing cache to start from; None if there is none yet.
        timing_out: where to write the timing cache.
    """

    checkpoint: str
    output: str
    timing_in: str | None
    timing_out: str


def command(build: BuildSettings, limits: BuildLimits, places: BuildPaths) -> list[Part]:
    """Return the command in parts of one option each, with every limit for the log; the first is the program."""
    parts: list[Part] = [(PROGRAM,), ("--checkpoint_dir", places.checkpoint), ("--output_dir", places.output)]
    if places.timing_in is not None:
        parts.append(("--input_timing_cache", places.timing_in))
    parts.append(("--output_timing_cache", places.timing_out))
    limit = asdict(limits)
    for option in OPTIONS.values():
        if option.key in DECIDED:
            continue
        value = limit.get(option.key, build[option.key])
        if option.key in SIZES or value != option.default:
            values = () if option.type == FLAG else value if option.type == LIST else (value,)
            parts.append((option.name, *map(str, values)))
    return parts


def identity(build: BuildSettings) -> dict[str, Any]:
    """Return what determines the engine's bytes: the limits, and the options that differ from the defaults."""
    values = build.every()
    changed = {name for name, option in OPTIONS.items() if name in values and values[name] != option.default}
    return {key: values[key] for key in sorted(changed - set(NO_BYTES) | {*SIZES, "tokens_per_block"})}


BUILT_ON = "built_on.json"
"""Written beside the engine: trtllm-build itself records only its own version."""
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class BuiltOn:
    """GPU and versions that an engine is tied to."""

    gpu: str
    sm: float
    tensorrt_llm: str
    tensorrt: str

    @classmethod
    def here(cls, gpu: str, sm: float) -> Self:
        """Return this machine's versions, without importing the packages."""
        return cls(gpu, sm, *library_versions(("tensorrt_llm", "tensorrt")).values())

    @classmethod
    def load(cls, engine_dir: Path) -> Self | None:
        """Read the record of an engine that this project built; None for an engine from elsewhere."""
        path = engine_dir / BUILT_ON
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def save(self, engine_dir: Path) -> None:
        """Write the record beside the engine."""
        (engine_dir / BUILT_ON).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def file_name(self) -> str:
        """Return a name for files that belong to this GPU and these versions, e.g. timing caches."""
        gpu = re.sub(r"[^a-zA-Z0-9]+", "_", self.gpu).strip("_")
        return f"{gpu}-sm{self.sm:g}-tensorrt_llm{self.tensorrt_llm}-tensorrt{self.tensorrt}".replace("/", "_")


def read_back(engine_dir: Path, build: BuildSettings, limits: BuildLimits, checkpoint: CheckpointConfig) -> list[Fault]:
    """Compare trtllm-build's output with the request; an empty list means a good engine."""
    path = engine_dir / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        pretrained, built = raw["pretrained_config"], raw["build_config"]
        version = str(raw["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Fault(f"trtllm-build wrote no engine configuration: {path}: {error!r}.")]
    engines = [engine_dir / f"rank{rank}.engine" for rank in range(checkpoint.world_size)]
    faults = [
        Fault(f"trtllm-build wrote no {file.name}; the checkpoint has {count(len(engines), 'rank')}.")
        for file in engines
        if not file.is_file() or file.stat().st_size == 0
    ]
    faults += [*_model(pretrained, checkpoint), *_limits(built, build, limits)]
    here = library_versions(("tensorrt_llm",))["tensorrt_llm"]
    if here not in ("absent", version):
        faults.append(
            Fault(
                f"The engine records TensorRT-LLM {version}; the package here is {here}.",
                "trtllm-build and tensorrt_llm must come from the same installation.",
                "Check: which trtllm-build",
            )
        )
    return faults


def _model(pretrained: dict[str, Any], checkpoint: CheckpointConfig) -> Iterator[Fault]:
    mapping, quantization = pretrained.get("mapping") or {}, pretrained.get("quantization") or {}
    pairs = {
        "architecture": (pretrained.get("architecture"), checkpoint.architecture),
        "quant_algo": (quantization.get("quant_algo"), checkpoint.quantization.quant_algo),
        "kv_cache_quant_algo": (
            quantization.get("kv_cache_quant_algo"),
            checkpoint.quantization.kv_cache_quant_algo,
        ),
        "tp_size": (mapping.get("tp_size", 1), checkpoint.tp_size),
        "pp_size": (mapping.get("pp_size", 1), checkpoint.pp_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield Fault(f"The engine has {name}={ours}, the checkpoint {name}={theirs}.")


def _limits(built: dict[str, Any], build: BuildSettings, limits: BuildLimits) -> Iterator[Fault]:
    requested = adjusted(build, limits)
    speculative = build.speculative_decoding_mode is not None  # increases these two by the number of draft tokens
    for name in SIZES:
        limit, actual = requested[name], built.get(name)
        if speculative and name in ("max_seq_len", "max_num_tokens") and isinstance(actual, int) and actual >= limit:
            continue
        if actual != limit:
            yield Fault(f"The engine has {name}={actual}; {name}={limit} was requested.")


def adjusted(build: BuildSettings, limits: BuildLimits) -> dict[str, int]:
    """Return the limits as the builder adjusts them: it warns and continues.

    Source: TensorRT-LLM `builder.py` (`_init_max_seq_len`) and `_common.py` (`check_max_num_tokens`).
    """
    sizes = {name: int(getattr(limits, name)) for name in SIZES}
    sizes["max_input_len"] = min(sizes["max_input_len"], sizes["max_seq_len"])
    most = sizes["max_batch_size"] * sizes["max_seq_len"]
    if build["remove_input_padding"] == "disable":
        return sizes | {"max_num_tokens": most}
    tokens = min(sizes["max_num_tokens"], most)
    least = limits.tokens_per_block if build["context_fmha"] == "enable" else sizes["max_input_len"]
    return sizes | {"max_num_tokens": max(tokens, least)}


# Check an engine against this machine: it runs only on the GPU generation and under the versions that built it.
#
# Source: TensorRT's "engine plan file is not compatible" and "expecting compute 8.0 got 8.9": tensorrtllm_backend
# issues 194, 424 and 531, TensorRT-LLM issues 1695 and 1838, llama_index issue 12318.


def fit_faults(engine_dir: Path) -> list[Fault]:
    """Compare an engine with this machine's GPU, TensorRT and TensorRT-LLM; unknown values are skipped."""
    gpus = gather().gpus
    here = BuiltOn.here(gpus[0].name if gpus else "", gpus[0].sm if gpus else 0.0)
    return list(_faults(engine_dir, here))


def _faults(engine_dir: Path, here: BuiltOn) -> Iterator[Fault]:
    built = BuiltOn.load(engine_dir)
    version = json.loads((engine_dir / CONFIG).read_text(encoding="utf-8")).get("version")
    pairs = [("TensorRT-LLM", str(version) if version else "absent", here.tensorrt_llm)]
    if built is not None:
        pairs.append(("TensorRT", built.tensorrt, here.tensorrt))
        if here.gpu and built.sm != here.sm:
            yield Fault(
                f"The engine '{engine_dir}' was built on {built.gpu} (compute capability {built.sm:g}); "
                f"this machine has {here.gpu} ({here.sm:g}).",
                "A TensorRT engine runs only on the compute capability it was built on.",
                *_rebuild(engine_dir),
            )
    for tool, then, now in pairs:
        if then != now and "absent" not in (then, now):
            yield Fault(
                f"The engine '{engine_dir}' was built by {tool} {then}; this machine has {tool} {now}.",
                "An engine runs only under the versions that built it.",
                *_rebuild(engine_dir),
            )


def _rebuild(engine_dir: Path) -> tuple[str, tuple[str, ...]]:
    """Return what to do and the command that made the engine or its repository; here it makes another one.

    A repository has its engine in `<model>/<version>/engine` and its manifest at the top.
    """
    for folder in (engine_dir, *engine_dir.absolute().parents[2:3]):
        if (manifest := folder / MANIFEST).is_file():
            return "Build it here:", tuple(shlex.split(json.loads(manifest.read_text(encoding="utf-8"))["repeat"]))
    return "Build it here: make build engine=tensorrt_llm, with the same overrides.", ()
