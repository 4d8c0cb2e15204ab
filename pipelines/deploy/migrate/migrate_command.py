"""The command `migrate`: read a TensorRT-LLM 1.2 deployment and write it in the words of the LLM API."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pipelines.deploy.migrate.sources import WORDS, OldDeployment, OldSetting, read_old
from pipelines.deploy.migrate.translate import MODEL, Formats, State, Word, arguments, judge, text, translate
from pipelines.deploy.trtllm_serve import LAUNCH, QUIET
from pipelines.document import blocks
from pipelines.document.show import number, percent
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.engines.registry import TENSORRT_LLM
from pipelines.engines.tensorrt_llm.llm_api import sampling_option
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_folder
from pipelines.host.machine import gather
from pipelines.host.screen import tell, warn
from pipelines.plan.deployment import Deployment
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.groups import choices
from pipelines.settings.model import ModelSettings
from pipelines.settings.plain import override
from pipelines.settings.root import Settings
from pipelines.store.manifest import read_manifests
from pipelines.store.sources import shape_of
from pipelines.store.store import Store
from triton_repo import parameters
from triton_repo.llmapi import OPTIONS as OPTIONS_FILE

PAGE, SERVE = "migration.md", "serve.sh"
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
ANY_MODEL = "model.path=/its/hugging/face/folder"


@dataclass(frozen=True, slots=True)
class Migration:
    """A deployment in the words of the LLM API.

    Attributes:
        words: what becomes of each setting.
        model: override that names the model, as "model=llama_3_8b".
        measured: variant -> facts of its newest fidelity on the CPU engine (kl_mean, top1_agreement, tokens).
        making: other overrides of `make build`: of the draft model, and of pruning.
    """

    name: str
    old: OldDeployment
    formats: Formats
    words: Sequence[Word]
    model: str
    measured: Mapping[str, Mapping[str, Any]]
    making: Sequence[str] = ()

    def of(self, *states: State) -> list[Word]:
        """Return the words in these states."""
        return [word for word in self.words if word.state in states]

    def files(self) -> dict[str, str]:
        """Return the files by name; only the page if the LLM API does not run the model."""
        if any(word.old == MODEL for word in self.of("lost")):
            return {PAGE: blocks.render_markdown(self._page())}
        options = yaml.safe_dump(arguments(self.words), sort_keys=False)
        return {OPTIONS_FILE: options, SERVE: self._script(), PAGE: blocks.render_markdown(self._page())}

    @property
    def _nodes(self) -> str:
        """Machines of one instance, where several are stated."""
        return next((each.value for each in self.old.settings if each.name == "num_nodes" and each.value != "1"), "")

    def _script(self) -> str:
        """Return the script that serves: one server for each instance of the old model."""
        lines = ["#!/bin/bash", f"# Written by `make migrate`. The checkpoint: {self._make('build')}", QUIET]
        lines.append("model=${1:?the Hugging Face folder or name of the model}")
        ranks = f"mpirun --hostfile hosts -n {self.old.world_size} -x TRTLLM_NO_USAGE_STATS {LAUNCH} "
        instances = [",".join(group) for group in self.old.groups] or [""]
        for port, devices in enumerate(instances, 8000):
            start = (f"CUDA_VISIBLE_DEVICES={devices} " if devices else "") + (ranks if self._nodes else "")
            options = f'--port {port} --extra_llm_api_options "$(dirname "$0")/{OPTIONS_FILE}"'
            lines.append(f'{start}trtllm-serve "$model" {options}{" &" if len(instances) > 1 else ""}')
        return "\n".join([*lines, *(["wait"] if len(instances) > 1 else []), ""])

    def _make(self, *command: str) -> str:
        """Return a command on the checkpoint, in the old format or in the best that runs instead."""
        lost = "quant" in self.formats.instead
        quant = next(iter(self._ranked("quant")), "none") if lost else self.formats.quant or "..."
        keys = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}
        sizes = [f"build.{key}={word.value}" for key, to in keys.items() for word in self.words if word.to == to]
        kv_cache = ["kv_cache=fp8"] if self.formats.kv_cache is KvFormat.FP8 else []
        formats = [f"quant={quant}", *kv_cache]
        return shlex.join(["make", *command, "engine=tensorrt_llm_llmapi", self.model, *formats, *sizes, *self.making])

    def _facts(self, group: str, choice: str) -> Mapping[str, Any]:
        quant = self.formats.quant or "none"
        variant = choice if group == "quant" else f"{quant}-kv_{choice}".removeprefix("none-")
        return self.measured.get(variant, {})

    def _ranked(self, group: str) -> list[str]:
        """Return the formats that run instead of a lost one: the least divergence first, then what is not measured."""
        choices = [each for each in self.formats.instead[group] if each not in ("none", "auto")]
        return sorted(choices, key=lambda each: self._facts(group, each).get("kl_mean", float("inf")))

    def _page(self) -> blocks.Document:
        counts = ", ".join(f"{len(self.of(each))} {each}" for each in ("kept", "renamed", "lost", "unknown"))
        steps = [self._make("build"), f"bash {SERVE} /its/engine/checkpoint"]
        steps += [self._make("repository"), self._make("manifests")]
        if self._nodes:
            steps.append(self._make("scripts", "cluster=slurm") + f" triton.num_nodes={self._nodes}")
        if any(word.old == MODEL for word in self.of("lost")):
            steps = ["# nothing: the LLM API does not run this model; TensorRT-LLM 1.2 does"]
        costs = tuple(self._costs(group) for group in self.formats.instead)
        sections = {
            "Lost": (*_table("What the LLM API does not have", self.of("lost")), *costs),
            "Renamed": _table("Other words for the same", self.of("renamed")),
            "Kept": _table("The same words", self.of("kept")),
            "Not needed": _listed(self.of("needless")),
            "Unknown, or ignored today": _listed(self.of("unknown", "ignored")),
            "Next": (blocks.Code(tuple(steps)),),
        }
        lead = f"{counts}. An engine cannot be taken along: the LLM API loads a Hugging Face checkpoint."
        return blocks.Document(
            title=f"{self.name}: from TensorRT-LLM's engines to its LLM API",
            subtitle=f"Read: {', '.join(self.old.read)}. TensorRT-LLM {self.old.version or 'of a version not stated'}.",
            cards=(),
            lead=(blocks.Callout("warning" if self.of("lost") else "good", lead),),
            sections=tuple(blocks.Section(title, title, content) for title, content in sections.items() if content),
        )

    def _costs(self, group: str) -> blocks.Table:
        """Compare formats by their divergence from the 16-bit model, with the command for what is not measured."""
        shape, today = self.formats.shape, getattr(self.formats, group)
        foreign = shape is not None and shape.architecture and not shape.family.cpu_engine
        rows: list[tuple[str, ...]] = []
        for choice in [*([today] if today else []), *self._ranked(group)]:
            quant = choice if group == "quant" else self.formats.quant or "none"
            kv_cache = [f"kv_cache={choice}"] if group == "kv_cache" else []
            command = shlex.join(["make", "fidelity", self.model, f"quant={quant}", *kv_cache, "engine=openvino"])
            facts = self._facts(group, choice)
            figures = number(facts.get("kl_mean")), percent(facts.get("top1_agreement")), str(facts.get("tokens", ""))
            source = "the CPU engine does not run this model" if foreign else f"unknown: measure with {command}"
            rows.append((choice, *figures, "newest fidelity in the store" if facts else source))
        return blocks.Table(
            f"Instead of {group}={today or '...'}: predictions beside those of the 16-bit model, on the CPU engine",
            "measured" if any(row[3] for row in rows) else "",
            (*blocks.left(group), *blocks.right("mean KL, nats", "top-1, %", "tokens"), *blocks.left("source")),
            tuple(rows),
            notes=(
                "Formats that the LLM API runs for this model, on all its GPUs unless one is named (hardware=...).",
            ),
        )


def _table(caption: str, words: Sequence[Word]) -> tuple[blocks.Block, ...]:
    """Return a table without the columns that are empty."""
    titles = ("engine", "LLM API", "note", "instead", "stated in")
    rows = [
        (word.old, word.to and f"{word.to}={text(word.value)}", word.why, word.instead, word.place) for word in words
    ]
    used = [at for at in range(len(titles)) if any(row[at] for row in rows)]
    cells = tuple(tuple(row[at] for at in used) for row in rows)
    return (blocks.Table(caption, "", blocks.left(*(titles[at] for at in used)), cells),) if rows else ()


def _listed(words: Sequence[Word]) -> tuple[blocks.Block, ...]:
    """Return a list with the settings of each reason together."""
    items = (
        f"{', '.join(word.old for word in words if word.why == why)}: {why}" for why in {word.why: 0 for word in words}
    )
    return (blocks.BulletList(tuple(items)),) if words else ()


def migrate(overrides: Sequence[str]) -> int:
    """Write the LLM API's options, a script and a page for a deployment."""
    settings = load(overrides)
    source, store = settings.migrate, Store(settings.paths.store)
    check_folders({"migrate.folder": source.folder})
    model = next((word for word in reversed(overrides) if word.startswith(("model=", "model.path="))), ANY_MODEL)
    if source.path or source.command:
        old, sm = read_old(source.path, source.command), settings.hardware.sm
        name = (source.path or Path("trtllm-build")).absolute().name
        if model == ANY_MODEL and (old.model in choices("model") or Path(old.model or "?").is_dir()):
            model = f"model={old.model}" if old.model in choices("model") else override("model.path", old.model)
            settings = load([*overrides, model])
    else:
        plan = make_plan(settings, "build", store, gather())
        warn(*plan.warnings)
        deployment = plan.deployment
        if deployment.engine != TENSORRT_LLM:
            raise UserError(
                f"engine={deployment.engine.setting} has no TensorRT engine to migrate.",
                allowed="Give engine=tensorrt_llm, migrate.path=FOLDER or 'migrate.command=trtllm-build ...'.",
            )
        old, sm, name = _of_settings(deployment), deployment.gpu.sm, deployment.label
        model = f"model={settings.model.name}" if model == ANY_MODEL else model
    if model != ANY_MODEL and not settings.prune.prunes:
        _check_model(old, settings.model, model)
    formats = judge(old, sm)
    measured = _fidelities(store, settings.model.label) if model != ANY_MODEL else {}
    draft = _draft(settings)
    also = ("prune", *(("speculative", "model@speculative.draft") if draft else ()))
    making = [word for word in overrides if word.startswith(also)]
    translated = translate(old, formats, settings.image.llm_api_version, draft)
    migration = Migration(name, old, formats, translated, model, measured, making)
    folder = source.folder.absolute() / name
    made = migration.files()
    changed = write_folder(folder, made, command="make migrate", setting="migrate.folder")
    tell(f"{'written' if changed else 'unchanged'}: {relative_to_cwd(folder)}: {', '.join(made)}")
    for word in migration.of("lost", "unknown"):
        tell(f"{word.state}: {word.old}: {word.why}")
    for word in migration.of("ignored"):
        warn(f"{word.old} in {word.place}: {word.why}")
    return 0


def _check_model(old: OldDeployment, model: ModelSettings, word: str) -> None:
    """Refuse an engine whose sizes are not those of the model, as far as both are known."""
    shape = None
    with suppress(UserError):  # on another machine, or of a family that is judged later
        shape = shape_of(model)
    sizes = {name: (old.pretrained.get(name), getattr(shape, name, None)) for name in SIZES}
    wrong = {name: pair for name, pair in sizes.items() if None not in pair and pair[0] != pair[1]}
    if wrong:
        built, named = (", ".join(f"{name}={pair[at]}" for name, pair in wrong.items()) for at in (0, 1))
        raise UserError(
            f"{old.read[0]} is of another model than {word}: it has {built}; the model has {named}.",
            todo="Name the model that the engine was built from: model=NAME or model.path=FOLDER; of a pruned one also"
            " prune=... as it was pruned.",
        )


def _draft(settings: Settings) -> dict[str, Any]:
    """Return the LLM API's `speculative_config` of a draft model; empty without one."""
    drafts = settings.speculative
    if drafts.draft is None or drafts.num_draft_tokens is None:
        return {}
    source = str(drafts.draft.folder or drafts.draft.hub_id)
    word, tokens = settings.image.draft_word, drafts.num_draft_tokens
    sampling = sampling_option(settings.image.llm_api_version)
    return {"decoding_type": word, "max_draft_len": tokens, "speculative_model": source, **sampling}


def _of_settings(deployment: Deployment) -> OldDeployment:
    settings, shape, form = deployment.settings, deployment.shape, FORMATS[deployment.settings.quant.qformat]
    triton = {name: value for name, value in settings.triton.model_dump().items() if name in WORDS["triton"]}
    triton["enable_kv_cache_reuse"] = settings.kv_cache.enable_block_reuse
    triton["enable_chunked_context"] = settings.runtime.enable_chunked_context
    built = [OldSetting("build", *pair, "build", given=False) for pair in settings.build.every().items()]
    served = [
        OldSetting("triton", name, parameters.text(value), "triton", given=False)
        for name, value in triton.items()
        if value is not None
    ]
    sizes = {name: (getattr(settings.build, name), "build") for name in ("tp_size", "pp_size")}
    pretrained: dict[str, Any] = {} if shape is None else asdict(shape)
    return OldDeployment(
        read=("the settings",),
        settings=(*(each for each in built if each.name not in sizes), *served),
        version="1.2",
        pretrained={**pretrained, "quantization": {"pre_quant_scale": form.tuning == "awq"}},
        algorithms=(form.quant_algo, {"auto": None}.get(settings.kv_cache.dtype, settings.kv_cache.dtype.upper())),
        sizes=sizes,
    )


def _fidelities(store: Store, label: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the facts of the newest fidelity of each variant of a model."""
    folders = [folder for folder in store.folders() if folder.parent.name == "fidelity"]
    manifests = sorted(read_manifests(folders, []).values(), key=lambda manifest: str(manifest["created"]))
    return {
        str(each["label"]).removeprefix(f"{label}-"): each["facts"]
        for each in manifests
        if str(each["label"]).startswith(f"{label}-") and "kl_mean" in each["facts"]
    }
