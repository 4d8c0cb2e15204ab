"""Say before an evaluation starts that it cannot end with GO, or has nothing to be compared with."""

from __future__ import annotations

from eval.config import EvalSettings
from eval.dataset import LAYOUT, complete_subjects
from eval.results import all_references, references_of
from eval.spec import BUNDLED, JSON_VALIDITY, MMLU, PASSKEY, TASK_SIZES, WRITTEN, known_questions, task_fault
from eval.verdict import Criteria, least_for_go, least_to_stop, too_few
from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.domain.errors import Fault
from pipelines.plan.deployment import Deployment
from pipelines.plan.targets import EVALUATED
from pipelines.store.sources import InputSource


def unknown_reference(d: Deployment) -> list[Fault]:
    """Refuse to compare with a published accuracy where none is known."""
    model, asked = d.settings.model.label, d.settings.eval
    if d.target not in EVALUATED or asked.baseline != "reference" or references_of(model, asked.task):
        return []
    known = dict.fromkeys(f"{each.model} ({each.task})" for each in all_references())
    return [
        Fault(
            f"eval.baseline=reference, but no published accuracy of {model} on {asked.task} is known.",
            f"Known: {', '.join(known)}.",
            "Use eval.baseline=build, which also gives a verdict.",
        )
    ]


def question_faults(d: Deployment) -> list[Fault]:
    """Check that the task is known and that its questions can be had."""
    asked = d.settings.eval
    if asked.url is not None and d.target != "evaluate":
        return [
            Fault(
                f"eval.url='{asked.url}' only works with `make evaluate`, `make fidelity` and `make diagnose`.",
                todo="Leave eval.url out.",
            )
        ]
    if asked.url is not None and asked.baseline == "hugging_face":
        return [
            Fault(
                "eval.baseline=hugging_face is not evaluated beside a server (eval.url).",
                todo="Evaluate it by itself, without eval.url.",
            )
        ]
    if asked.guided and asked.task != JSON_VALIDITY:
        return [
            Fault(
                f"eval.guided=true has no effect on eval.task='{asked.task}', whose questions have no JSON schema.",
                todo="Leave it out, or set eval=json_validity.",
            )
        ]
    if asked.baseline == "hugging_face" and asked.task in WRITTEN:
        return [
            Fault(
                f"eval.baseline=hugging_face scores choices; the answers of eval.task='{asked.task}' are written.",
                todo="Leave eval.baseline out.",
            )
        ]
    if asked.is_auto:
        return []
    if fault := task_fault(asked.task) or chat_fault(asked, d.sources.get("model")):
        return [fault]
    if asked.task == MMLU and asked.dataset_path is not None:
        subjects, complete = TASK_SIZES[MMLU][0], complete_subjects(asked.dataset_path.expanduser())
        if complete < subjects:
            what = f"eval.dataset_path='{asked.dataset_path}' has {complete} subjects with questions; mmlu has"
            return [
                Fault(
                    f"{what} {subjects}.",
                    LAYOUT,
                    "Give a complete copy, or set eval= to the task whose questions it has.",
                )
            ]
    if asked.task in BUNDLED or asked.dataset or asked.dataset_path or asked.path:
        return []
    return [
        Fault(
            f"eval.task='{asked.task}' has no data: eval.dataset and eval.dataset_path are null.",
            todo="Set eval.dataset to the task's data set on the Hub, or eval.dataset_path to a copy of it.",
        )
    ]


def chat_fault(asked: EvalSettings, model: InputSource | None) -> Fault | None:
    """Refuse a chat template that the tokenizer lacks, as far as it is on disk, or that cannot be applied."""
    if asked.task == PASSKEY and (asked.apply_chat_template or asked.system_instruction):
        which = "apply_chat_template=true" if asked.apply_chat_template else "system_instruction"
        return Fault(
            f"eval.{which} makes prompts longer, and those of eval.task='{PASSKEY}' are as long as the engine takes.",
            todo="Leave it out.",
        )
    if not asked.apply_chat_template:
        return None
    if asked.asks_triton and asked.task in WRITTEN:
        from eval.server import WRITTEN_CHATS, WRITTEN_CHATS_TODO  # loads numpy and asyncio

        return Fault(WRITTEN_CHATS.format(url=asked.url), todo=WRITTEN_CHATS_TODO)
    if model is None or "default" in chat_templates(model.path)[0]:
        return None
    return Fault(
        f"eval.apply_chat_template=true, but the tokenizer at '{model.path}' has no chat template.",
        "It is in chat_template.jinja, or under chat_template in tokenizer_config.json.",
        "Set eval.apply_chat_template=false, or use the instruction-tuned model.",
    )


WITHOUT_QUESTIONS = (
    "Give questions of your own (eval=local eval.path=questions.csv) or a copy of mmlu (eval.dataset_path=/copy), fill "
    "the Hub's cache (HF_HOME, HF_HUB_OFFLINE=1), or ask about the bundled models' synthetic domain (eval=mini_mmlu)."
)


def nothing_to_do(d: Deployment, *, compares: bool) -> list[Fault]:
    """Refuse an evaluation that has neither questions nor predictions to compare."""
    if d.target != "evaluate" or not d.settings.eval.is_auto or compares:
        return []
    return [
        Fault(
            f"eval.task='auto' finds no questions for {d.settings.model.label}: mmlu is not on this machine, and "
            "cannot be had from the Hub. Nor are there predictions to compare with those of a 16-bit model here.",
            todo=WITHOUT_QUESTIONS,
        )
    ]


def asked_questions(wanted: EvalSettings) -> int | None:
    """Return how many questions would be asked at most; None if that is not known before they are read."""
    known = known_questions(wanted.task, wanted.limit)
    if known is None or (wanted.dataset_path is not None and wanted.limit is None):  # a copy may hold another number
        return None
    return min(known, wanted.max_questions or known)


def few_questions(d: Deployment) -> list[Fault]:
    """Warn of too few questions for GO, as far as their number is known before they are read."""
    wanted, stops = d.settings.eval, d.is_sequential
    asked, criteria = asked_questions(wanted), Criteria.of(wanted)
    if not d.has_verdict or asked is None or not too_few(asked, criteria, stops=stops):
        return []
    least = least_to_stop(criteria) if stops else least_for_go(criteria)
    subjects, questions = TASK_SIZES[wanted.task]
    what = f"eval.limit={wanted.limit}" if wanted.limit else f"eval.task={wanted.task}"
    todo = f"Set eval.limit={-(-least // subjects)} or more."
    if stops and wanted.max_questions == asked:
        what, todo = f"eval.max_questions={asked}", f"Set eval.max_questions={least} or more."
    return [
        Fault(
            f"{what} asks {asked:,} questions, which are too few for GO even if every answer stays the same.",
            f"With eval.margin_points={wanted.margin_points:g} and eval.false_go={wanted.false_go:g}, GO takes "
            f"{least:,} or more{' where asking may stop early' if stops else ''}.",
            todo if least <= questions else "Give a larger eval.margin_points, or a larger task.",
        )
    ]


def sequential_notes(d: Deployment) -> tuple[str, ...]:
    """Say how many questions are asked at most, or that settings of asking in turns have no effect."""
    wanted = d.settings.eval
    if not d.asks:
        return ()
    if d.is_sequential:
        of = asked_questions(wanted)
        return (f"questions: in random order, {'' if of is None else f'{of:,} at most, '}until the verdict is known",)
    given = {
        "eval.sequential=true": wanted.sequential is True,
        f"eval.max_questions={wanted.max_questions}": wanted.max_questions is not None,
        f"eval.judged_together={wanted.judged_together}": wanted.judged_together > 1,
    }
    unused = [name for name, is_given in given.items() if is_given]
    if not unused:
        return ()
    why = "asking does not stop early here" if d.settings.is_compressed else "the model is the baseline itself"
    return (f"no effect: {', '.join(unused)}, because {why}; all questions are asked",)
