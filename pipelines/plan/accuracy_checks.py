"""Say before an evaluation starts that it cannot end with GO, or has nothing to be compared with."""

from __future__ import annotations

from eval.config import EvalSettings
from eval.results import all_references, references_of
from eval.spec import PASSKEY, TASK_SIZES, WRITTEN, known_questions
from eval.verdict import Criteria, least_for_go, least_to_stop, too_few
from pipelines.domain.errors import Fault
from pipelines.plan.targets import EVALUATED, Target, asks, has_baseline, has_reference, is_sequential
from pipelines.plan.user_inputs import Found
from pipelines.settings.root import Settings


def unknown_reference(settings: Settings, target: Target) -> list[Fault]:
    """Refuse to compare with a published accuracy where none is known."""
    model, task = settings.model.label, settings.eval.task
    if target not in EVALUATED or settings.eval.baseline != "reference" or references_of(model, task):
        return []
    known = dict.fromkeys(f"{each.model} ({each.task})" for each in all_references())
    return [
        Fault(
            f"eval.baseline=reference, but no published accuracy of {model} on {task} is known.",
            f"Known: {', '.join(known)}.",
            "Use eval.baseline=build, which also gives a verdict.",
        )
    ]


def chat_fault(asked: EvalSettings, found: Found) -> Fault | None:
    """Refuse a chat template that the tokenizer lacks, as far as it is on disk, or that cannot be applied."""
    if asked.task == PASSKEY and (asked.apply_chat_template or asked.system_instruction):
        which = "apply_chat_template=true" if asked.apply_chat_template else "system_instruction"
        return Fault(
            f"eval.{which} makes prompts longer, and those of eval.task='{PASSKEY}' are as long as the engine takes.",
            todo="Leave it out.",
        )
    if not asked.apply_chat_template:
        return None
    # here, because they load what renders templates, a sixth of the time in which a plan is imported
    from eval.server import WRITTEN_CHATS, WRITTEN_CHATS_TODO
    from pipelines.checkpoint.tokenizer import chat_templates

    if asked.asks_triton and asked.task in WRITTEN:
        return Fault(WRITTEN_CHATS.format(url=asked.url), todo=WRITTEN_CHATS_TODO)
    model = found.sources.get("model")
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


def nothing_to_do(settings: Settings, target: Target, *, compares: bool) -> list[Fault]:
    """Refuse an evaluation that has neither questions nor predictions to compare."""
    if target != "evaluate" or not settings.eval.is_auto or compares:
        return []
    return [
        Fault(
            f"eval.task='auto' finds no questions for {settings.model.label}: mmlu is not on this machine, and cannot "
            "be had from the Hub. Nor are there predictions to compare with those of a 16-bit model here.",
            todo=WITHOUT_QUESTIONS,
        )
    ]


def asked_questions(settings: Settings) -> int | None:
    """Return how many questions would be asked at most; None if that is not known before they are read."""
    wanted = settings.eval
    known = known_questions(wanted.task, wanted.limit)
    if known is None or (wanted.dataset_path is not None and wanted.limit is None):  # a copy may hold another number
        return None
    return min(known, wanted.max_questions or known)


def few_questions(settings: Settings, target: Target) -> list[Fault]:
    """Warn of too few questions for GO, as far as their number is known before they are read."""
    wanted, stops = settings.eval, is_sequential(settings, target)
    asked, criteria = asked_questions(settings), Criteria.of(settings.eval)
    if not (has_baseline(settings, target) or has_reference(settings, target)) or asked is None:
        return []
    if not too_few(asked, criteria, stops=stops):
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


def sequential_notes(settings: Settings, target: Target) -> tuple[str, ...]:
    """Say how many questions are asked at most, or that settings of asking in turns have no effect."""
    wanted = settings.eval
    if not asks(settings, target):
        return ()
    if is_sequential(settings, target):
        of = asked_questions(settings)
        return (f"questions: in random order, {'' if of is None else f'{of:,} at most, '}until the verdict is known",)
    given = {
        "eval.sequential=true": wanted.sequential is True,
        f"eval.max_questions={wanted.max_questions}": wanted.max_questions is not None,
        f"eval.judged_together={wanted.judged_together}": wanted.judged_together > 1,
    }
    unused = [name for name, is_given in given.items() if is_given]
    if not unused:
        return ()
    own = settings.baseline().variant == settings.variant
    why = "the model is the baseline itself" if own else "asking does not stop early here"
    return (f"no effect: {', '.join(unused)}, because {why}; all questions are asked",)
