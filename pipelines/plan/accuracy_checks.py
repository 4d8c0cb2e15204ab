"""Say before an evaluation starts that it cannot end with GO, or has nothing to be compared with."""

from eval.config import EvalSettings
from eval.dataset import LAYOUT, complete_subjects
from eval.results import all_references, references_of
from eval.spec import (
    BUNDLED,
    JSON_VALIDITY,
    LOCAL,
    MMLU,
    PASSKEY,
    PICTURES,
    TASK_SIZES,
    is_written,
    known_questions,
    task_fault,
    written_chats_fault,
)
from eval.verdict import Criteria, least_for_go, least_to_stop, too_few
from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.domain.errors import Fault
from pipelines.engines.registry import ServerBackend
from pipelines.plan.deployment import Deployment
from pipelines.plan.targets import EVALUATED
from pipelines.store.sources import InputSource

SEES = "Use model=tiny_llava, or multimodal=llava with a LLaVA's folder"
"""What to do where a model reads text alone."""


def unknown_reference(d: Deployment) -> Fault | None:
    """Refuse to compare with a published accuracy where none is known."""
    model, questions = d.settings.model.label, d.settings.eval
    if d.target not in EVALUATED or questions.baseline != "reference" or references_of(model, questions.task):
        return None
    published = dict.fromkeys(f"{each.model} ({each.task})" for each in all_references())
    return Fault(
        f"eval.baseline=reference, but no published accuracy of {model} on {questions.task} is known.",
        f"Known: {', '.join(published)}.",
        "Use eval.baseline=build, which also gives a verdict.",
    )


def question_fault(d: Deployment) -> Fault | None:
    """Check that the task is known and that its questions can be had."""
    questions = d.settings.eval
    if questions.url is not None and d.target != "evaluate":
        return Fault(
            f"eval.url='{questions.url}' only works with `make evaluate`, `make fidelity` and `make diagnose`.",
            todo="Leave eval.url out.",
        )
    if questions.url is not None and questions.baseline == "hugging_face":
        return Fault(
            "eval.baseline=hugging_face is not evaluated beside a server (eval.url).",
            todo="Evaluate it by itself, without eval.url.",
        )
    if fault := _without_effect(questions):
        return fault
    if questions.baseline == "hugging_face" and is_written(questions.task):
        return Fault(
            f"eval.baseline=hugging_face scores choices; the answers of eval.task='{questions.task}' are written.",
            todo="Leave eval.baseline out.",
        )
    if questions.is_auto:
        return None
    if fault := task_fault(questions.task) or _unseen(d) or chat_fault(questions, d.sources.get("model")):
        return fault
    if questions.task == MMLU and questions.dataset_path is not None:
        subjects, complete = TASK_SIZES[MMLU][0], complete_subjects(questions.dataset_path.expanduser())
        if complete < subjects:
            what = f"eval.dataset_path='{questions.dataset_path}' has {complete} subjects with questions; mmlu has"
            return Fault(
                f"{what} {subjects}.", LAYOUT, "Give a complete copy, or set eval= to the task whose questions it has."
            )
    if questions.task in BUNDLED or questions.dataset or questions.dataset_path or questions.path:
        return None
    return Fault(
        f"eval.task='{questions.task}' has no data: eval.dataset and eval.dataset_path are null.",
        todo="Set eval.dataset to the task's data set on the Hub, or eval.dataset_path to a copy of it.",
    )


def _without_effect(questions: EvalSettings) -> Fault | None:
    """Refuse settings that this task's questions have no use for."""
    if questions.guided and questions.task != JSON_VALIDITY:
        return Fault(
            f"eval.guided=true has no effect on eval.task='{questions.task}', whose questions have no JSON schema.",
            todo="Leave it out, or set eval=json_validity.",
        )
    revision = None if questions.revision == "main" else questions.revision
    given = {
        "dataset": questions.dataset,
        "revision": revision,
        "dataset_path": questions.path and questions.dataset_path,
    }
    if questions.task in (*BUNDLED, LOCAL) and (name := next((name for name, value in given.items() if value), None)):
        whose = "are those of eval.path" if questions.path else "ship with the project"
        return Fault(
            f"eval.{name}='{given[name]}' has no effect on eval.task='{questions.task}', whose questions {whose}.",
            todo="Leave it out, or set eval= to the task whose questions it has.",
        )
    return None


def _unseen(d: Deployment) -> Fault | None:
    """Refuse questions about pictures where nothing sees them."""
    task = f"eval.task='{PICTURES}' asks about pictures"
    if d.target not in EVALUATED or d.settings.eval.task != PICTURES:
        return None
    if d.settings.eval.url is not None or d.has_reference or d.engine.server is not ServerBackend.PYTHON:
        where = f"eval.url={d.settings.eval.url}" if d.settings.eval.url else f"engine={d.engine.setting}"
        where = "eval.baseline=hugging_face" if d.has_reference else where
        return Fault(f"{task}, which {where} is not shown.", "The CPU engine sees them.", "Use engine=openvino.")
    if d.settings.multimodal.model_type == "none":
        return Fault(
            f"{task}, and {d.settings.model.label} reads text alone.",
            todo=f"{SEES}.",
        )
    return None


def chat_fault(questions: EvalSettings, model: InputSource | None) -> Fault | None:
    """Refuse a chat template that the tokenizer lacks, as far as it is on disk, or that cannot be applied."""
    if questions.task == PASSKEY and (questions.apply_chat_template or questions.system_instruction):
        which = "apply_chat_template=true" if questions.apply_chat_template else "system_instruction"
        return Fault(
            f"eval.{which} makes prompts longer, and those of eval.task='{PASSKEY}' are as long as the engine takes.",
            todo="Leave it out.",
        )
    if not questions.apply_chat_template:
        return None
    if questions.asks_triton and is_written(questions.task):
        return written_chats_fault(questions.url)
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


def nothing_to_do(d: Deployment, *, compares: bool) -> Fault | None:
    """Refuse an evaluation that has neither questions nor predictions to compare."""
    if d.target != "evaluate" or not d.settings.eval.is_auto or compares:
        return None
    return Fault(
        f"eval.task='auto' finds no questions for {d.settings.model.label}: mmlu is not on this machine, and "
        "cannot be had from the Hub. Nor are there predictions to compare with those of a 16-bit model here.",
        todo=WITHOUT_QUESTIONS,
    )


def asked_questions(questions: EvalSettings) -> int | None:
    """Return how many questions would be asked at most; None if that is not known before they are read."""
    number = known_questions(questions.task, questions.limit)
    is_copy = questions.dataset_path is not None and questions.limit is None  # which may hold another number
    if number is None or is_copy:
        return None
    return min(number, questions.max_questions or number)


def few_questions(d: Deployment) -> Fault | None:
    """Warn of too few questions for GO, as far as their number is known before they are read."""
    questions, stops = d.settings.eval, d.is_sequential
    number, criteria = asked_questions(questions), Criteria.of(questions)
    if not d.has_verdict or number is None or not too_few(number, criteria, stops=stops):
        return None
    least = least_to_stop(criteria) if stops else least_for_go(criteria)
    subjects, size = TASK_SIZES[questions.task]
    what = f"eval.limit={questions.limit}" if questions.limit else f"eval.task={questions.task}"
    todo = f"Set eval.limit={-(-least // subjects)} or more."
    if stops and questions.max_questions == number:
        what, todo = f"eval.max_questions={number}", f"Set eval.max_questions={least} or more."
    return Fault(
        f"{what} asks {number:,} questions, which are too few for GO even if every answer stays the same.",
        f"With eval.margin_points={questions.margin_points:g} and eval.false_go={questions.false_go:g}, GO takes "
        f"{least:,} or more{' where asking may stop early' if stops else ''}.",
        todo if least <= size else "Give a larger eval.margin_points, or a larger task.",
    )


def sequential_notes(d: Deployment) -> tuple[str, ...]:
    """Say how many questions are asked at most, or that settings of asking in turns have no effect."""
    questions = d.settings.eval
    if not d.asks:
        return ()
    if d.is_sequential:
        of = asked_questions(questions)
        return (f"questions: in random order, {'' if of is None else f'{of:,} at most, '}until the verdict is known",)
    settings = {
        "eval.sequential=true": questions.sequential is True,
        f"eval.max_questions={questions.max_questions}": questions.max_questions is not None,
        f"eval.judged_together={questions.judged_together}": questions.judged_together > 1,
    }
    unused = [name for name, is_given in settings.items() if is_given]
    if not unused:
        return ()
    why = "asking does not stop early here" if d.settings.is_compressed else "the model is the baseline itself"
    return (f"no effect: {', '.join(unused)}, because {why}; all questions are asked",)
