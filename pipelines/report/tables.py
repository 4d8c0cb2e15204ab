"""Tables of a report about the artifacts: accuracy, sizes, provenance."""

from collections.abc import Sequence

from eval.compare import bound_cells, published_table
from eval.perplexity import perplexity_table
from eval.results import EvalResult, references_of
from pipelines.document.blocks import Column, Table, groups, left, right
from pipelines.document.show import NONE, percent, span, when
from pipelines.domain.units import show_bytes, show_seconds
from pipelines.report.data import Accuracy, ArtifactInput, FormatReport, ReportData, ReportedArtifact, place_of


def accuracy_table(data: ReportData) -> Table:
    """Return the accuracy of every format with the verdict against the baseline and what it rests on."""
    pairs = [(item, item.accuracy) for item in data.formats if item.accuracy]
    return _accuracies(data, pairs, "Accuracy")


def other_tasks_table(data: ReportData) -> Table | None:
    """Return the same for the tasks that fewer formats were evaluated on; None if there are none."""
    pairs = [(item, each) for item in data.formats for each in item.other_tasks]
    pairs.sort(key=lambda each: each[1].result.task)
    return _accuracies(data, pairs, "Other tasks") if pairs else None


def _accuracies(data: ReportData, pairs: Sequence[tuple[FormatReport, Accuracy]], title: str) -> Table:
    results = [accuracy.result for _, accuracy in pairs]
    tasks = dict.fromkeys(f"{each.task}, {each.shots}, engine {each.engine}" for each in results)
    several = len({each.task for each in results}) > 1
    return Table(
        caption=f"{title}: model {', '.join(data.models)}; {'; '.join(tasks)}",
        origin="measured",
        columns=(
            *left("format"),
            *right("questions"),
            *groups("accuracy", ("%", "± %")),
            *groups("against the baseline", ("loss %", "lost", "gained")),
            *groups("loss, points", ("measured", "at least", "at most")),
            *right("p"),
            *left("verdict"),
        ),
        rows=tuple(
            _accuracy_cells(accuracy, _name(item, data) + (f", {accuracy.result.task}" if several else ""))
            for item, accuracy in pairs
        ),
        notes=("Lost: answered right only by the baseline; gained: only by this format. ±: standard error.",),
    )


def perplexities(data: ReportData) -> Table | None:
    """Return the perplexity of texts by format, with the ratio to the baseline's; None if nothing was read."""
    named = [
        (_name(item, data), each.baseline if each.baseline != each.result else None, each.result)
        for item in data.formats
        for each in item.perplexities
    ]
    return perplexity_table(named) if named else None


def published_tables(data: ReportData) -> list[Table]:
    """Return the accuracies that NVIDIA published beside those measured; a table per model and task."""
    by_task: dict[tuple[str, str], list[EvalResult]] = {}
    for item in data.formats:
        for each in (item.accuracy, *item.other_tasks):
            if each:
                by_task.setdefault((each.result.model, each.result.task), []).append(each.result)
    return [published_table(results) for key, results in by_task.items() if references_of(*key)]


def _name(item: FormatReport, data: ReportData) -> str:
    """Return the format, with the model if the report contains several."""
    return item.label if len(data.models) > 1 else item.variant


def _accuracy_cells(accuracy: Accuracy, name: str) -> tuple[str, ...]:
    result, row = accuracy.result, accuracy.row
    cells = [name, f"{result.questions:,}", percent(result.accuracy), percent(result.overall.stderr)]
    if row is None:
        why = accuracy.missing or "baseline"
        return (*cells, *[NONE] * 7, why)
    return (
        *cells,
        NONE if row["loss_percent"] is None else f"{row['loss_percent']:.2f}",
        str(row["lost"]),
        str(row["gained"]),
        f"{0.0 - 100 * row['difference']:+.2f}",
        *bound_cells(row),
        row["verdict"],
    )


def subject_table(item: Sequence[FormatReport]) -> Table | None:
    """Return accuracy by category and subject, with a column per format of a model; None if nothing was evaluated."""
    results = [(each.variant, each.accuracy.result) for each in item if each.accuracy]
    if not results:
        return None
    rows = []
    for title, attribute in (("category", "categories"), ("subject", "subjects")):
        names = dict.fromkeys(name for _, result in results for name in getattr(result, attribute))
        for name in names:
            scores = [getattr(result, attribute).get(name) for _, result in results]
            questions = span([score.questions for score in scores if score])
            rows.append((name, title, questions, *(percent(s.accuracy, 1) if s else NONE for s in scores)))
    return Table(
        caption=f"Accuracy in percent by category and subject: {item[0].model}, {results[0][1].task}",
        origin="measured",
        columns=(*left("name", "kind"), *right("questions"), *(Column(variant) for variant, _ in results)),
        rows=tuple(rows),
    )


def size_table(data: ReportData) -> Table:
    """Return sizes of checkpoint and engine on disk, and peak memory and time of each stage."""
    rows = []
    for item in data.formats:
        quantize, build, evaluate = (item.artifact(stage) for stage in ("quantize", "build", "evaluate"))
        peaks = [artifact and artifact.peak_memory_bytes for artifact in (quantize, build, evaluate)]
        rows.append(
            (
                _name(item, data),
                _size(quantize, "source_bytes"),
                _size(quantize, "total_bytes"),
                _size(build, "engine_bytes"),
                *(_took(artifact) for artifact in (quantize, build, evaluate)),
                *(show_bytes(peak) if peak else NONE for peak in peaks),
            )
        )
    return Table(
        caption="Weights on disk; time and highest resident memory of the process that created or evaluated them",
        origin="measured",
        columns=(
            *left("format"),
            *groups("on disk", ("source", "checkpoint", "engine")),
            *groups("time", ("quantize", "build", "evaluate")),
            *groups("peak memory", ("quantize", "build", "evaluate")),
        ),
        rows=tuple(rows),
    )


def build_memory_table(data: ReportData) -> Table | None:
    """Return the memory of TensorRT engines on the fullest rank, predicted and as logged by trtllm-build, or None."""
    rows = []
    for item in data.formats:
        facts = artifact.facts if (artifact := item.artifact("build")) else {}
        predicted = facts.get("memory_predicted")
        if predicted and "weights_bytes" in facts:
            figures = (facts.get("weights_bytes"), facts.get("activation_bytes"), facts.get("peak_gpu_bytes"))
            modelled = (show_bytes(predicted[part]) for part in ("weights", "activations"))
            rows.append((_name(item, data), *modelled, *(show_bytes(size) if size else NONE for size in figures)))
    if not rows:
        return None
    return Table(
        caption="Memory of the fullest rank: predicted (modelled) and as logged by trtllm-build (measured)",
        origin="",
        columns=(
            *left("format"),
            *groups("predicted (modelled)", ("weights", "activations")),
            *groups("build log (measured)", ("weights", "activations", "peak during the build")),
        ),
        rows=tuple(rows),
    )


def memory_table(data: ReportData) -> Table | None:
    """Return the memory of the engine's process, predicted before the build and highest observed; None without any."""
    rows = []
    parts = ("weights", "activations", "kernels", "kv_pool", "total")
    for item in data.formats:
        for run in item.runs:
            predicted = run.artifact.facts.get("memory_predicted") or {}
            observed = run.artifact.facts.get("memory_observed") or {}
            if not (predicted and observed):
                continue
            used = observed.get("kv_blocks_used")
            rows.append(
                (
                    _name(item, data),
                    run.result.workload["name"],
                    *(show_bytes(predicted[part]) if part in predicted else NONE for part in parts),
                    show_bytes(observed["total"]) if "total" in observed else NONE,
                    f"{predicted['kv_blocks']:,.0f}",
                    f"{observed['kv_blocks']:,.0f}" if "kv_blocks" in observed else NONE,
                    NONE if used is None else f"{used:,.0f}",
                )
            )
    if not rows:
        return None
    return Table(
        caption="Memory of the CPU engine's process: predicted (modelled) and observed (measured)",
        origin="",
        columns=(
            *left("format", "workload"),
            *groups("predicted (modelled)", ("weights", "activations", "kernels", "KV cache", "total")),
            *groups("observed (measured)", ("highest",)),
            *groups("KV blocks", ("predicted", "observed", "used")),
        ),
        rows=tuple(rows),
        notes=(
            "Predicted for the most that this load can reach: iterations with all users' prompts together, at most"
            " max_num_tokens; compiled kernels for as many different iterations as possible, up to the number that is"
            " kept; every KV block used once, since finished prompts stay cached. A short benchmark stays below that.",
        ),
    )


def _size(artifact: ReportedArtifact | None, fact: str) -> str:
    return show_bytes(artifact.facts[fact]) if artifact and artifact.facts.get(fact) else NONE


def _took(artifact: ReportedArtifact | None) -> str:
    return show_seconds(artifact.seconds) if artifact and artifact.seconds is not None else NONE


def _input(source: ArtifactInput) -> str:
    place = "" if source.in_store else f" ({place_of(source)})"
    return f"{source.name} {source.digest[:12]}{place}"


def chain_table(item: FormatReport) -> Table:
    """Return the artifacts of one format in order of dependency."""
    rows = tuple(
        (
            artifact.stage,
            artifact.place.removeprefix(f"{artifact.stage}/"),
            artifact.digest[:12],
            "; ".join(map(_input, artifact.inputs)) or NONE,
            when(artifact.created),
            _took(artifact),
            artifact.commit[:12] + ("+changes" if artifact.commit.endswith("+changes") else ""),
        )
        for artifact in item.chain
    )  # fmt: skip
    return Table(
        caption=f"Artifacts that {item.label} was made from, by digest of their content",
        origin="recorded",
        columns=(
            *left("stage", "artifact", "digest", "made from", "started"),
            *right("duration"),
            *left("source commit"),
        ),
        rows=rows,
    )
