"""The commands that build and serve on a GPU, for `make plan`, so that they can be pasted one after the other.

Folder names are chosen beforehand, because an artifact's name ends with a key that depends on its inputs. The project's
own steps (quantization with ModelOpt, the Triton repository) are a `make stage` with a link of that name; all others
run NVIDIA's own programs.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pipelines.engines.registry import ServerBackend
from pipelines.engines.tensorrt_llm.folder import BuildPaths, BuiltOn, command
from pipelines.host.disk import relative_to_cwd
from pipelines.host.screen import CONTINUED, command_lines, wrapped
from pipelines.plan.plan import Plan, PlannedStep
from pipelines.settings.plain import override
from pipelines.stages import Stage
from pipelines.stages.build import Build, limits_for
from pipelines.stages.evaluate import Evaluate, EvaluateByTrtllmServe, EvaluateSequentially
from pipelines.stages.repository import WriteRepository
from pipelines.stages.script import Script
from pipelines.stages.unified import ConfigureLlm, ExportEdge, device_commands
from pipelines.store.sources import InputSource
from triton_repo.llmapi import serve_command
from triton_repo.parameters import start_commands

INDENT = 4
BESIDE = {"draft_engine", "vision_engine"}
"""Inputs of a repository that are engines besides the model's own."""
TIMING_CACHE = "timing.cache"
OF_THE_IMAGE = ("image.", "paths.")
"""Overrides that `make image` and `make shell` read, besides engine=."""
DECIDES = "image.base_llm_api"
OF_THE_STAGE = ("image.", "stage.")
"""Overrides that a stage by itself does not take over, except those of the version that reads the LLM API's options."""

Lines = list[str]
Block = tuple[str, Lines]
"""Title and command."""


def gpu_commands(plan: Plan, overrides: Sequence[str] = ()) -> Lines:
    """Render the commands; no lines for engines on the CPU, or when nothing is left to build or serve."""
    if not plan.deployment.engine.needs_gpu:
        return []
    blocks = list(_ByHand(plan, tuple(overrides)).blocks())
    if not blocks:
        return []
    why = "; ".join(plan.deployment.engine.lacks(plan.deployment.machine))
    if plan.not_here:
        message = plan.not_here[0].message
        why = (message.partition(": ")[2] or message).rstrip(".")
    head = f"Commands (not run here: {why})" if why else "Commands"
    lines = ["", wrapped(f"{head}, to paste one after the other:")]
    return [*lines, *chain.from_iterable((wrapped(f"  {title}", 4), *block) for title, block in blocks)]


@dataclass(frozen=True, slots=True)
class _ByHand:
    """Renders the commands of a plan."""

    plan: Plan
    overrides: tuple[str, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield the commands in the order they are pasted."""
        if (nodes := self.plan.settings.triton.num_nodes) > 1:
            words = ["make", "scripts", "cluster=slurm", *self._words()]
            yield f"{nodes} nodes: scripts that build on one of them and serve on all", _command(words)
            return
        made = [*self._built(), *self._repository(), *self._evaluated()]
        served = list(self._served())
        if (made or served) and self.plan.deployment.engine.lacks(self.plan.deployment.machine):
            if self.plan.deployment.engine.builder:  # else the folders are made on any machine, and served elsewhere
                words = [f"engine={self.plan.deployment.engine.setting}"]
                words += [word for word in self.overrides if word.startswith(OF_THE_IMAGE)]
                commands = [*_command(["make", "image", *words]), *_command(["make", "shell", *words])]
                yield "container, in which the rest is typed", commands
            elif served and not self.plan.deployment.engine.on_device:
                inside = _nvidias_container(self.plan.settings.image.base_llm_api)
                served.insert(0, ("container, in which the rest is typed", inside))
        yield from made
        yield from served

    def _built(self) -> Iterator[Block]:
        """Yield what makes the engines, except the baseline's, and before each what it is made from."""
        done: set[str] = set()
        timed = False
        for step in self.plan.steps:
            stage = step.node.stage
            if step.artifact or _of_baseline(step) or not isinstance(stage, Build | Script | ConfigureLlm | ExportEdge):
                continue
            if isinstance(stage, ConfigureLlm | ExportEdge):
                yield step.node.id, self._ours(step)
                continue
            for before in self._inputs(step):
                if not (before.artifact or before.node.id in done or _of_nvidia(before.node.stage)):
                    done.add(before.node.id)
                    yield before.node.id, self._ours(before)
            if isinstance(stage, Build):
                yield step.node.id, self._build(step, stage, later=timed)
                timed = True
            else:
                inputs = step.node.inputs.items()
                places = {name: str(wired.path) for name, wired in inputs if isinstance(wired, InputSource)}
                for before in self._inputs(step):
                    places |= {name: self._name(before) for name, wired in inputs if wired == before.node.id}
                yield step.node.id, _option_lines(stage.command(places, self._name(step)))

    def _repository(self) -> Iterator[Block]:
        for step in self.plan.steps:
            if isinstance(step.node.stage, WriteRepository) and not (step.artifact or _of_baseline(step)):
                several = BESIDE & step.node.inputs.keys()
                built = next((s for s in self._inputs(step) if s.node.id == step.node.inputs["engine"]), None)
                engine = []  # the override that serves the engine built by hand, where it is the only one
                if built and not built.artifact and _of_nvidia(built.node.stage) and not several:
                    engine = [override("engine.path", self._name(built))]
                again = ", which builds its engines again: engine.path= names only one" if several else ""
                yield step.node.id + again, self._ours(step, *engine)

    def _evaluated(self) -> Iterator[Block]:
        kinds = Evaluate | EvaluateByTrtllmServe
        todo = [step for step in self.plan.steps if isinstance(step.node.stage, kinds) and not step.artifact]
        if todo:
            both = any(_of_baseline(step) or isinstance(step.node.stage, EvaluateSequentially) for step in todo)
            baseline = " and its 16-bit baseline" if both else ""
            title = f"evaluate, which builds the engine{baseline} in the store"
            if isinstance(todo[0].node.stage, EvaluateByTrtllmServe):
                title = "evaluate, where trtllm-serve is on PATH"
            yield title, _command(["make", "evaluate", *self._words()])

    def _served(self) -> Iterator[Block]:
        serving = self.plan.settings.serving
        for step in self.plan.steps:
            if _of_baseline(step):
                continue
            if isinstance(step.node.stage, ExportEdge):
                yield f"copy {self._name(step)} to the device, and there, in that folder", []
                positions = self.plan.deployment.positions
                build, address = self.plan.settings.build, (serving.host, serving.openai_port)
                for title, line in device_commands(build, positions, *address).items():
                    yield title, _command(shlex.split(line))
            elif isinstance(step.node.stage, ConfigureLlm):
                line = serve_command(serving.host, serving.ports["openai_port"])
                yield "serve, with an OpenAI API", _inside(self._name(step), line)
            elif isinstance(stage := step.node.stage, WriteRepository):
                start = start_commands(stage.triton, stage.spec)
                other = stage.spec.engine.server is ServerBackend.LLM_API
                title = f"or serve, in {start['needs'].rstrip('.')}" if other else "serve"
                given = [word for word in self.overrides if word.lstrip("+").startswith("serving.")]
                if given and not other:
                    place = override("serving.repository", self._name(step))
                    yield title, _command(["make", "serve", place, *given])
                    continue
                yield title, _inside(self._name(step), next(iter(start["commands"].values())))

    def _words(self) -> list[str]:
        overrides = [(word, word.lstrip("+~")) for word in self.overrides]
        return [word for word, key in overrides if key.startswith(DECIDES) or not key.startswith(OF_THE_STAGE)]

    def _inputs(self, step: PlannedStep) -> list[PlannedStep]:
        return [other for other in self.plan.steps if other.node.id in step.node.inputs.values()]

    def _name(self, step: PlannedStep) -> str:
        """Return the folder of what a step writes: the artifact, or a name of its own."""
        if step.artifact:
            return relative_to_cwd(step.artifact.path)
        prefix = "draft-" if step.node.id.startswith("draft.") else ""
        return f"{step.node.label}-{prefix}{step.node.stage.writes}"

    def _ours(self, step: PlannedStep, *more: str) -> Lines:
        own = [f"stage.name={step.node.id}", override("stage.link", self._name(step))]
        return _command(["make", "stage", *own, *self._words(), *more])

    def _build(self, step: PlannedStep, stage: Build, *, later: bool) -> Lines:
        before = step.node.inputs.get("checkpoint", step.node.inputs.get("converted"))
        checkpoint = next(self._name(s) for s in self.plan.steps if s.node.id == before)
        places = BuildPaths(checkpoint, self._name(step), self._timing(stage, later=later), TIMING_CACHE)
        return _option_lines(command(stage.build, limits_for(stage.build, stage.longest), places))

    def _timing(self, stage: Build, *, later: bool) -> str | None:
        """Return the timing cache to start from: the one of the build before, or of this machine's builds."""
        if later:
            return TIMING_CACHE
        if not self.plan.deployment.machine.gpus or stage.on_gpu is None:
            return None
        cache = stage.on_gpu.timing_caches / f"{BuiltOn.here(stage.on_gpu.gpu, stage.on_gpu.sm or 0.0).file_name}.cache"
        return relative_to_cwd(cache) if cache.is_file() else None


def _nvidias_container(image: str) -> Lines:
    """Render the start of the container with `trtllm-serve`, as TensorRT-LLM's `docs/source/quick-start-guide.md`.

    Its reports of use to NVIDIA are off (`tensorrt_llm/usage/schemas/README.md`).
    """
    options = ["--rm", "--interactive", "--tty", "--gpus=all", "--ipc=host", "--network=host"]
    options += ["--ulimit=memlock=-1", "--ulimit=stack=67108864", "--env=TRTLLM_NO_USAGE_STATS=1"]
    options += ['--mount=type=bind,source="$PWD",target=/work', "--workdir=/work"]
    return command_lines(["docker", "run", *options, image], INDENT)


def _of_baseline(step: PlannedStep) -> bool:
    return step.node.id.startswith("baseline.")


def _of_nvidia(stage: Stage) -> bool:
    """Return whether a program of NVIDIA's does all the work of a stage."""
    return isinstance(stage, Build | Script)


def _command(words: Sequence[str]) -> Lines:
    return command_lines([shlex.quote(word) for word in words], INDENT)


def _option_lines(options: Sequence[Sequence[str]]) -> Lines:
    rows = [shlex.join(option) for option in options]
    lines = [" " * INDENT + rows[0], *(" " * (INDENT + 2) + row for row in rows[1:])]
    return [*(line + CONTINUED for line in lines[:-1]), lines[-1]]


def _inside(folder: str, line: str) -> Lines:
    """Render a shell line that runs inside a folder, and leaves the shell where it is."""
    words = re.findall(r"(?:'[^']*'|[^\s'])+", line)  # keeps quotes and patterns as they are
    return command_lines([f"(cd {shlex.quote(folder)}", "&&", *words[:-1], f"{words[-1]})"], INDENT)
