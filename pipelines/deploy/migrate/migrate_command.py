"""The command `migrate`: read a TensorRT-LLM 1.2 deployment and write it in the words of the LLM API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.deploy.migrate.page import ANY_MODEL, Migration
from pipelines.deploy.migrate.sources import WORDS, OldDeployment, OldSetting, read_old
from pipelines.deploy.migrate.translate import Draft, judge, translate
from pipelines.deploy.output import write_folder
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.engines.registry import TENSORRT_LLM
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.machine import gather
from pipelines.host.screen import say, warn
from pipelines.plan.deployment import Deployment
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.settings.groups import choices
from pipelines.settings.root import Settings
from pipelines.store.manifest import Manifests
from pipelines.store.store import Store
from triton_repo.parameters import text


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
            model = f"model={old.model}" if old.model in choices("model") else f"model.path={old.model}"
            settings = load([*overrides, model])
    else:
        deployment = make_plan(settings, "build", store, gather()).deployment
        if deployment.engine != TENSORRT_LLM:
            raise UserError(
                f"engine={deployment.engine.setting} has no TensorRT engine to migrate.",
                allowed="Give engine=tensorrt_llm, migrate.path=FOLDER or 'migrate.command=trtllm-build ...'.",
            )
        old, sm, name = _of_settings(deployment), deployment.gpu.sm, deployment.label
        model = f"model={settings.model.name}" if model == ANY_MODEL else model
    formats = judge(old, sm)
    measured = _fidelities(store, settings.model.label) if model != ANY_MODEL else {}
    draft = _draft(settings, overrides)
    translated = translate(old, formats, settings.image.llm_api_version, draft)
    migration = Migration(name, old, formats, translated, model, measured, draft.overrides if draft else ())
    folder = source.folder.absolute() / name
    made = migration.files()
    changed = write_folder(folder, made, command="make migrate", setting="migrate.folder")
    say(f"{'written' if changed else 'unchanged'}: {relative_to_cwd(folder)}: {', '.join(made)}")
    for word in migration.of("lost", "unknown"):
        say(f"{word.state}: {word.old}: {word.why}")
    for word in migration.of("ignored"):
        warn(f"{word.old} in {word.place}: {word.why}")
    return 0


def _draft(settings: Settings, overrides: Sequence[str]) -> Draft | None:
    drafts = settings.speculative
    if drafts.draft is None or drafts.num_draft_tokens is None:
        return None
    named = tuple(word for word in overrides if word.startswith(("speculative", "model@speculative.draft")))
    source = str(drafts.draft.folder or drafts.draft.hub_id)
    return Draft(source, drafts.num_draft_tokens, settings.image.draft_word, named)


def _of_settings(deployment: Deployment) -> OldDeployment:
    settings, shape, form = deployment.settings, deployment.shape, FORMATS[deployment.settings.quant.qformat]
    triton = {name: value for name, value in settings.triton.model_dump().items() if name in WORDS["triton"]}
    triton["enable_kv_cache_reuse"] = settings.kv_cache.enable_block_reuse
    triton["enable_chunked_context"] = settings.runtime.enable_chunked_context
    built = [OldSetting("build", *pair, "build", given=False) for pair in settings.build.every().items()]
    served = [
        OldSetting("triton", name, text(value), "triton", given=False)
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
    folders = [folder for folder in store.folders() if folder.parent.name == "fidelity"]
    manifests = sorted(Manifests.read(folders).whole.values(), key=lambda manifest: str(manifest["created"]))
    return {
        str(each["label"]).removeprefix(f"{label}-"): each["facts"]
        for each in manifests
        if str(each["label"]).startswith(f"{label}-") and "kl_mean" in each["facts"]
    }
