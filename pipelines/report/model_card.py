"""Model cards for quantized checkpoints, as the Hub shows them: README.md with metadata in YAML before the text.

The card belongs to the report and not to the checkpoint: accuracy and fidelity are measured after the checkpoint was
made, and must not change what it is. Missing facts are "unknown", missing measurements "not measured".
"""

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from eval.compare import method_text, verdict_sentence
from eval.fidelity.fidelity_text import HEADINGS, NO_DIRECTION, READING, figure_rows, legend
from eval.verdict import Verdict
from pipelines.checkpoint.describe import left_in_16_bit
from pipelines.document import blocks as doc
from pipelines.document.show import count, percent, settings_text
from pipelines.domain.formats import KvFormat
from pipelines.domain.units import show_bytes
from pipelines.host.files import disk_faults, write_text
from pipelines.report.checkpoints import mix_terms, pruning_terms, recovery_terms
from pipelines.report.data import BASELINE, Accuracy, FormatReport, ReportData, ReportedArtifact, place_of

FOLDER = "model_cards"
UNKNOWN = "unknown"
NOT_MEASURED = "not measured"
MOST_CARD_BYTES = 2**20
_METADATA = re.compile(r"---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_LICENSE = re.compile(r"[\w.+-]{1,100}")


def write_model_cards(data: ReportData, folder: Path) -> dict[str, Path]:
    """Write `model_cards/<model>-<variant>/README.md` for each quantized checkpoint of a report.

    Returns:
        the cards by label, "<model> <variant>".

    Raises:
        UserError: the folder cannot be written.
    """
    quantized = [item for item in data.formats if item.variant != BASELINE and item.artifact("quantize")]
    todo = "Choose another folder: report.folder=/some/folder"
    with disk_faults(f"The model cards cannot be written to {folder / FOLDER}", todo):
        return {item.label: write_text(_place(item, folder), model_card(item)) for item in quantized}


def _place(item: FormatReport, folder: Path) -> Path:
    place = folder / FOLDER / f"{item.model}-{item.variant}"
    place.mkdir(parents=True, exist_ok=True)
    return place / "README.md"


def model_card(item: FormatReport) -> str:
    """Return the card of a format whose checkpoint is in the report."""
    checkpoint = item.artifact("quantize")
    assert checkpoint is not None, "a card describes a checkpoint"
    metadata = yaml.safe_dump(_metadata(item, checkpoint), sort_keys=False, allow_unicode=True, width=120)
    return f"---\n{metadata}---\n\n{doc.render_markdown(_text(item, checkpoint))}"


def _metadata(item: FormatReport, checkpoint: ReportedArtifact) -> dict[str, Any]:
    """Return what the Hub reads; a fact that is unknown is left out, because the Hub has no word for it."""
    source, licence = _download(item), _license(item, checkpoint)
    metadata: dict[str, Any] = {}
    if source is not None:
        metadata |= {"base_model": str(source.settings["repo_id"]), "base_model_relation": "quantized"}
    if licence is not None:
        metadata["license"] = licence
    metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = ["tensorrt-llm", "modelopt", "quantized", str(checkpoint.settings["qformat"])]
    accuracies = [each for each in (item.accuracy, *item.other_tasks) if each is not None]
    if results := [
        _result(item, each) for each in accuracies if (each.row or {}).get("verdict") != Verdict.NOT_MEASURED
    ]:
        metadata["model-index"] = [{"name": f"{item.model}-{item.variant}", "results": results}]
    return metadata


def _result(item: FormatReport, accuracy: Accuracy) -> dict[str, Any]:
    result = accuracy.result
    task, _, how = result.metric.partition(",")
    metric = {
        "type": task,
        "value": result.accuracy,
        "name": f"{task} ({how}, {result.shots}, {count(result.questions, 'question')})",
        "verified": False,
    }
    # the name on the Hub of the data set whose questions were asked, if it came from there
    places = {each.source for each in accuracy.artifact.inputs if each.name == "dataset"}
    downloads = (each for each in item.chain if each.stage == "download" and each.place in places)
    kind = next((str(each.settings["repo_id"]) for each in downloads), result.task)
    dataset = {"name": result.task, "type": kind}
    return {"task": {"type": "text-generation"}, "dataset": dataset, "metrics": [metric]}


def _download(item: FormatReport) -> ReportedArtifact | None:
    downloads = [p for p in item.chain if p.stage == "download" and p.settings.get("repo_type", "model") == "model"]
    return downloads[0] if downloads else None


def _license(item: FormatReport, checkpoint: ReportedArtifact) -> str | None:
    """Return the licence that the source's card states, as the Hub recorded it or as its folder has it."""
    source, folder = _download(item), checkpoint.input("model")
    licence = source.facts.get("license") if source else None
    if source is None and folder and folder.path:
        readme = Path(folder.path) / "README.md"
        with suppress(OSError, yaml.YAMLError), readme.open(encoding="utf-8", errors="replace") as card:
            match = _METADATA.match(card.read(MOST_CARD_BYTES))
            metadata = yaml.safe_load(match.group(1)) if match else None
            licence = metadata.get("license") if isinstance(metadata, dict) else None
    return licence if isinstance(licence, str) and _LICENSE.fullmatch(licence) else None


def _text(item: FormatReport, checkpoint: ReportedArtifact) -> doc.Document:
    sections = (
        doc.Section("made", "What it is", (doc.Terms(_origin(item, checkpoint)),)),
        doc.Section("recipe", "Recipe", (doc.Terms(_recipe(item, checkpoint)),)),
        doc.Section("sizes", "Sizes", (doc.Terms(_sizes(item, checkpoint)),)),
        doc.Section("accuracy", "Accuracy", _accuracy(item)),
        doc.Section("fidelity", "Fidelity", _fidelity(item)),
        doc.Section("serve", "How to serve it", _serve(checkpoint)),
    )
    name = str(checkpoint.settings["qformat"])
    layout = "Hugging Face checkpoint in ModelOpt's layout" if _unified(checkpoint) else "TensorRT-LLM checkpoint"
    return doc.Document(
        title=f"{item.model}-{item.variant}",
        subtitle=f"{item.model}, quantized to {name}: a {layout}.",
        cards=(),
        lead=(),
        sections=sections,
    )


def _origin(item: FormatReport, checkpoint: ReportedArtifact) -> tuple[tuple[str, str], ...]:
    source, folder = _download(item), checkpoint.input("model")
    digest = f"content {folder.digest[:16]} (SHA-256)" if folder else f"content {UNKNOWN}"
    if source is not None:
        base = f"{source.settings['repo_id']} at commit {source.facts.get('commit', UNKNOWN)}"
    else:
        base = f"a local folder{f' named {Path(folder.path).name}' if folder and folder.path else ''}"
        base += f", {digest}; commit {UNKNOWN}"
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(checkpoint.libraries.items()))
    return (
        ("Source", base),
        ("Licence of the source", _license(item, checkpoint) or f"{UNKNOWN}: see the source"),
        ("Architecture", str(checkpoint.facts.get("architecture", UNKNOWN))),
        (
            "Made by",
            "; ".join(filter(None, (f"trtllm-pipelines {checkpoint.version} at {checkpoint.commit}", libraries))),
        ),
        ("Made on", checkpoint.created),
    )


def _recipe(item: FormatReport, checkpoint: ReportedArtifact) -> tuple[tuple[str, str], ...]:
    facts, settings = checkpoint.facts, checkpoint.settings
    linears = facts.get("linears_16bit")
    text, calibration = checkpoint.input("calibration"), "none: the format does not need any"
    seen = facts.get("calibration", {})
    if text and seen.get("sequences") != 0 and (how := settings.get("calibration")):
        read = f"{seen['sequences']:,} texts, {seen['tokens']:,} tokens" if seen.get("tokens") else UNKNOWN
        calibration = f"{read} of {place_of(text)}; {settings_text(how)}"
    pruned, sparse, trained = (item.artifact(stage) for stage in ("prune_model", "sparsify", "recover"))
    return (
        ("Format", f"{settings['qformat']} (quant_algo {facts.get('quant_algo') or UNKNOWN})"),
        *mix_terms(facts),
        ("KV cache", "16 bit" if settings.get("kv_cache") == KvFormat.AUTO else str(settings.get("kv_cache", UNKNOWN))),
        ("Group size", str(facts.get("group_size") or "none")),
        ("Everything else", str(facts.get("dtype", UNKNOWN))),
        ("Linears left in 16 bit", UNKNOWN if linears is None else left_in_16_bit(settings["qformat"], linears)),
        *(pruning_terms(pruned.facts) if pruned else ()),
        ("Sparsity", settings_text(sparse.settings) or "2:4" if sparse else "none"),
        *(recovery_terms(trained.facts) if trained else ()),
        ("Calibration", calibration),
        ("Ranks", f"tensor parallel {settings.get('tp_size', UNKNOWN)}, pipeline {settings.get('pp_size', UNKNOWN)}"),
    )


def _sizes(item: FormatReport, checkpoint: ReportedArtifact) -> tuple[tuple[str, str], ...]:
    facts, build = checkpoint.facts, item.artifact("build")
    bits = facts.get("bits_per_weight")
    return (
        ("Source", _bytes(facts.get("source_bytes"))),
        ("Checkpoint", _bytes(facts.get("total_bytes"))),
        ("Bits per weight of the linears", UNKNOWN if bits is None else f"{bits:.2f}"),
        ("Engine", f"{_bytes(build.facts.get('engine_bytes'))}, {build.settings['engine']}" if build else "not built"),
    )


def _bytes(size: int | None) -> str:
    return UNKNOWN if size is None else show_bytes(size)


def _accuracy(item: FormatReport) -> tuple[doc.Block, ...]:
    if item.accuracy is None:
        return (doc.Text(f"{NOT_MEASURED.capitalize()}."),)
    tasks = (item.accuracy, *item.other_tasks)
    return tuple(block for each in tasks for block in _task(each))


def _task(accuracy: Accuracy) -> tuple[doc.Block, ...]:
    result, row = accuracy.result, accuracy.row
    terms = [
        ("Task", f"{result.task}, {result.shots}, {count(result.questions, 'question')}, {result.metric}"),
        ("Accuracy", f"{percent(result.accuracy)} % (standard error {percent(result.overall.stderr)} %)"),
        ("Computed by", f"{result.engine}; prompts and scores by lm-eval {result.lm_eval_version}"),
    ]
    if row is None:
        why = accuracy.missing or "there is no baseline"
        return doc.Terms(tuple(terms)), doc.Text(f"Verdict: none, because {why}.")
    terms.append(("16-bit baseline", f"{percent(row['baseline_accuracy'])} % on the same questions"))
    terms.append(("Answers", f"{row['lost']:,} lost, {row['gained']:,} gained"))
    return doc.Terms(tuple(terms)), doc.BulletList((verdict_sentence(row),)), doc.Text(method_text(row))


def _fidelity(item: FormatReport) -> tuple[doc.Block, ...]:
    if item.fidelity is None:
        return (doc.Text(f"{NOT_MEASURED.capitalize()}."),)
    result = item.fidelity.result
    rows = figure_rows(result)
    table = doc.Table(
        caption=f"Predictions of the next token beside those of {result.reference} in 16 bit, engine {result.engine}",
        origin="measured",
        columns=(*doc.left("text"), *doc.right("tokens", *HEADINGS)),
        rows=tuple(rows),
        notes=(READING, f"Noise: the 16-bit model against itself.{legend(rows)}", NO_DIRECTION),
    )
    return (table,)


def _serve(checkpoint: ReportedArtifact) -> tuple[doc.Block, ...]:
    elsewhere: tuple[str, ...] = (
        "trtllm-build --checkpoint_dir . --output_dir ../engine",
        "trtllm-serve ../engine --backend tensorrt --tokenizer SOURCE",
    )
    if _unified(checkpoint):
        elsewhere = ("trtllm-serve .",)
    # without folders of the machine that made it, and without what was measured or asked beside
    dropped = ("paths.", "report.", "benchmark.", "sizing.")
    made = [w for w in shlex.split(checkpoint.repeat) if "=" in w and not w.lstrip("+~").startswith(dropped)]
    return (
        doc.Text("With trtllm-pipelines, which makes the same checkpoint from the source:"),
        doc.Code((shlex.join(["python", "-m", "pipelines", "serve", *made]),)),
        doc.Text("With TensorRT-LLM 1.2 on a GPU, in the folder of the checkpoint (not run for this card):"),
        doc.Code(elsewhere),
    )


def _unified(checkpoint: ReportedArtifact) -> bool:
    return checkpoint.settings.get("layout") == "hugging_face"
