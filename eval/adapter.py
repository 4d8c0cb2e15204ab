"""Adapt our engine to lm-eval, which builds the prompts and splits the tokens, while the session scores them."""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers import PreTrainedTokenizerFast

from eval.answer_cache import CachedSession
from eval.fidelity.measure import TOKENS_AT_ONCE, Side, not_finite
from eval.spec import IMAGE
from pipelines.checkpoint.tokenizer import chat_templates, opened
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Advance, Progress
from pipelines.engines.pictures import ScoredPictures
from pipelines.engines.port import (
    JsonGuide,
    LogitsSession,
    NotFiniteError,
    SamplingParams,
    ScoringSession,
    Session,
    TokenIds,
)
from pipelines.serving.openai.channels import Channels, HarmonyReader, channels_of
from pipelines.serving.openai.prompts import NoPromptError, Renderer
from pipelines.serving.openai.tokenizer import ServedTokenizer

Tokens = list[int]
Encoded = tuple[tuple[str, str] | None, Tokens, Tokens]

ENCODE_TOGETHER = 512
"""Requests tokenized in one call: enough to use all cores, few enough to limit the memory of texts and ids."""

GENERATION_SETTINGS = {"do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "until", "json_schema"}
READING = "reading prompts"
"""Title of the bar while prompts are tokenized."""
DEFAULT_NEW_TOKENS = 256
"""Output tokens if a task sets no limit, as in lm-eval's `hf`."""


@runtime_checkable
class TextSession(ScoringSession, Protocol):
    """A server that answers with text: to text, so that its own tokenizer is part of the test, or to token ids."""

    def write(
        self, prompts: Sequence[str | TokenIds], limits: SamplingParams, stop: Sequence[str], progress: Progress
    ) -> list[str]:
        """Generate for every prompt up to a stop string, which may be part of the answer."""
        ...


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that belongs to the checkpoint: tokenizer.json, whatever class is named.

    Raises:
        UserError: the folder has no tokenizer, or it cannot be read.
    """
    return PreTrainedTokenizerFast(**opened(folder).for_transformers())


class _PerQuestion:
    """A progress display that counts questions, although the work arrives as requests, one per choice."""

    def __init__(self, outer: Progress, requests: int, questions: int) -> None:
        self._outer, self._share = outer, questions / requests

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        questions = None if total is None else total * self._share
        with self._outer.task(title, questions, "questions") as advance:
            yield lambda amount: advance(amount * self._share)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._outer.note(text)


class OnOneBar:
    """A progress display whose tasks all advance one bar; prompts that are read are no answers."""

    def __init__(self, advance: Advance, outer: Progress) -> None:
        self._advance, self._outer = advance, outer

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        yield (lambda _amount: None) if title == READING else self._advance

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._outer.note(text)


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """A session behind lm-eval's interface; it scores exactly the tokens that lm-eval's `hf` model would.

    Attributes:
        tokenizer: the checkpoint's Hugging Face tokenizer, as `load_tokenizer` opens it.
        max_length: maximum number of tokens fed to the model.
        max_prompt: maximum number of tokens of a prompt whose answer is written; None if `max_length` alone limits it.
        truncated: number of prompts whose beginning was cut to fit.
    """

    def __init__(
        self,
        session: ScoringSession,
        tokenizer: Any,
        max_length: int,
        progress: Progress,
        *,
        max_prompt: int | None = None,
        chat: "ChatPrompts | None" = None,
        pictures: ScoredPictures | None = None,
    ) -> None:
        super().__init__()
        self._chat = chat
        self._pictures = pictures
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_prompt = max_prompt
        self.truncated = 0
        self._session = session
        self._folder = Path(tokenizer.name_or_path)
        self._progress = progress
        self._ends = opened(self._folder).end_ids
        self._bos_text = tokenizer.decode(self.prefix_token_id)
        vocabulary = tokenizer.get_vocab()
        channels = None if chat is None else channels_of(chat.template, vocabulary.get)
        self._think_end = channels.value[1] if channels and channels.value else None
        self._think_end_id = vocabulary.get(self._think_end)
        harmony = channels is Channels.HARMONY
        self._harmony = ServedTokenizer(self._folder, adds_special=False) if harmony else None
        self._memo: dict[str, Tokens] = {}
        self._ids = list(range(max(vocabulary.values()) + 1))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            UserError: neither the tokenizer nor the model names one.
        """
        if not self._ends:
            raise UserError(
                f"'{self._folder}' names no token that ends a text.",
                allowed="eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or config.json.",
            )
        return self._ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token placed before a text without context: BOS, or EOS for models without BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: object) -> Tokens:
        """Encode as lm-eval's `hf` does: special tokens as the tokenizer adds them, but no second BOS."""
        if add_special_tokens is not None:
            return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False))
        if (ids := self._memo.get(string)) is not None:
            return ids
        # not verbose: long texts are read in windows, so that there is nothing to warn of
        own = self._chat is None and not string.startswith(self._bos_text)
        return list(self.tokenizer.encode(string, add_special_tokens=own, verbose=False))

    @property
    def tokenizer_name(self) -> str:
        """Part of the name of lm-eval's file of prepared requests, which is not used here."""
        return str(self._folder)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages; lm-eval calls it where the chat template is applied."""
        assert self._chat is not None
        return self._chat.render(chat_history, answers=add_generation_prompt)

    @contextmanager
    def _encoded_together(self, requests: Sequence[Instance]) -> Iterator[None]:
        """Pre-encode the texts that lm-eval will request: each once and in parallel, 5 per question instead of 8."""
        contexts = {request.args[0].rstrip() for request in requests}
        texts = contexts | {request.args[0] + request.args[1] for request in requests}
        for special in (True, False):  # as in `tok_encode`
            bare = self._chat is not None  # a template writes the special tokens that belong into a prompt
            some = [text for text in texts if text and (bare or text.startswith(self._bos_text)) is not special]
            if some:
                batch = self.tokenizer(some, add_special_tokens=special, return_attention_mask=False, verbose=False)
                self._memo |= dict(zip(some, batch["input_ids"], strict=True))
        for text in contexts & self._memo.keys():
            # Contexts are kept until the end. With one shared int object per id, 14,042 prompts of 700 tokens
            # take 80 MB instead of 400.
            self._memo[text] = list(map(self._ids.__getitem__, self._memo[text]))
        try:
            yield
        finally:
            self._memo = {}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score all continuations in one call of the session, so that it can share prefixes."""
        if any(request.args[0] == "" for request in requests):
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return scores
        encoded: list[Encoded] = []
        progress = _PerQuestion(
            self._progress, len(requests), len({(each.task_name, each.doc_id) for each in requests})
        )
        with progress.task(READING, total=len(requests)) as advance:
            for start in range(0, len(requests), ENCODE_TOGETHER):
                block = requests[start : start + ENCODE_TOGETHER]
                with self._encoded_together(block):
                    encoded += [(request.args, *self._encoded(request)) for request in block]
                advance(len(block))
        return self._loglikelihood_tokens(encoded, progress=progress)

    def _encoded(self, request: Instance) -> tuple[Tokens, Tokens]:
        """Encode a prompt and an answer, with the ids of the question's picture if it has one."""
        context, continuation = self._encode_pair(*request.args)
        if self._pictures is not None:
            context = self._pictures.placed(context, base64.b64decode(request.doc[IMAGE]))
        return context, continuation

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], progress: Progress | None = None, **_kwargs: object
    ) -> list[tuple[float, bool]]:
        pairs, cut = [], set()
        for text, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"A continuation of {len(continuation)} tokens does not fit max_length={self.max_length}.",
                    todo="Build the engine with a larger max_seq_len.",
                )
            room = self.max_length + 1 - len(continuation)  # the last token is only predicted, never fed to the model
            if len(context) > room:
                cut.add(text and text[0])
                context = context[-room:]
            pairs.append((context, continuation))
        self.truncated += len(cut)
        scores = self._session.loglikelihood(pairs, progress or self._progress)
        if len(scores) != len(pairs):
            raise RuntimeError(f"the session returned {len(scores)} scores for {len(pairs)} pairs")
        for (text, _, _), (context, continuation), (score, _) in zip(requests, pairs, scores, strict=True):
            if math.isnan(score):
                seen = f"the engine returned NaN as log probability; the prompt ends with {str(text)[-80:]!r}"
                raise self._nan(RuntimeError(seen), [*context, *continuation])
        return scores

    def _nan(self, otherwise: Exception, tokens: TokenIds) -> Exception:
        """Return the error for a NaN, with the decoder block that it comes from if the engine shows that."""
        engine = self._session.engine if isinstance(self._session, CachedSession) else self._session
        if isinstance(engine, LogitsSession):
            return not_finite(Side("The engine", engine), [tokens[: self.max_length]], TOKENS_AT_ONCE)
        return otherwise

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts in windows of `max_length` tokens, each token once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            for context, continuation in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *utils.make_disjoint_window((context, continuation))))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate texts, all requests with equal settings together, and cut them at the stop strings."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for position, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(position)
        with self._progress.task("generating", len(requests), "requests") as advance:
            progress = OnOneBar(advance, self._progress)
            for settings, positions in groups.items():
                contexts = [str(requests[position].args[0]) for position in positions]
                answers = self._generate(contexts, json.loads(settings), progress)
                for position, text in zip(positions, answers, strict=True):
                    texts[position] = text
        return texts

    def _generate(self, contexts: Sequence[str], settings: dict[str, Any], progress: Progress) -> list[str]:
        arguments = dict(normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS))
        if unknown := set(arguments) - GENERATION_SETTINGS:
            raise UserError(
                f"generate_until does not support {', '.join(sorted(unknown))}.",
                allowed=f"Supported: {', '.join(sorted(GENERATION_SETTINGS))}.",
            )
        limits = SamplingParams(
            max_new_tokens=int(arguments["max_gen_toks"]),
            stop_token_ids=frozenset(self._ends),
            temperature=float(arguments.get("temperature", 0.0)),
            top_k=int(arguments.get("top_k", 0)),
            top_p=float(arguments.get("top_p", 1.0)),
            guide=None if (schema := arguments.get("json_schema")) is None else JsonGuide(schema, self._folder),
        )
        stop = handle_stop_sequences(arguments.get("until"), eos=None)
        if not isinstance(self._session, Session | TextSession):
            raise UserError(f"{type(self._session).__name__} only scores answers; this task needs generated text.")
        room = self.max_length - limits.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks={limits.max_new_tokens} leaves no room for a prompt in max_length={self.max_length}."
            )
        room = min(room, self.max_prompt or room)
        encoded = [self.tok_encode(context) for context in contexts]
        self.truncated += sum(len(prompt) > room for prompt in encoded)
        if isinstance(self._session, TextSession):
            prompts: list[str | TokenIds] = [
                context if len(prompt) <= room else self.tokenizer.decode(prompt[1 - room :])  # it adds BOS again
                for context, prompt in zip(contexts, encoded, strict=True)
            ]
            if self._chat is not None:  # a template writes BOS itself, to which the server would add another
                prompts = [prompt[-room:] for prompt in encoded]
            # a stop string would end the reasoning
            answers = self._session.write(prompts, limits, () if self._think_end else stop, progress)
            return [postprocess_generated_text(text, stop, self._think_end) for text in answers]
        try:
            made = self._session.generate([prompt[-room:] for prompt in encoded], limits, progress)
        except NotFiniteError as error:
            raise self._nan(error, error.tokens) from error
        # The session stops at tokens, not at strings, so text from a stop string on is cut here.
        return [postprocess_generated_text(self._answer(one.token_ids), stop, self._think_end) for one in made]

    def _answer(self, tokens: TokenIds) -> str:
        """Return the text of an answer; of harmony's messages those for the user, if it has any."""
        if self._think_end_id in tokens:  # where it is a special token, the text is without it
            tokens = tokens[len(tokens) - tokens[::-1].index(self._think_end_id) :]
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        if self._harmony is None:
            return text
        reader = HarmonyReader(self._harmony, calls=False, skip_special=True)
        return "".join(reader.push(token) or "" for token in tokens) + reader.rest() or text


# Prompts as chats: the model's own chat template around lm-eval's messages, as lm-eval's `hf` model renders them.
#
# A template comes with the model and is code: it runs in the server's bounded process for templates, not in this one.

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in the rendered text; the space shows whether the template strips it."""


class ChatPrompts:
    """Renders the messages of a prompt with the chat template of a model's folder."""

    def __init__(self, folder: Path, progress: Progress, *, system_instruction: str | None = None) -> None:
        """Start the process that renders.

        Args:
            folder: of the tokenizer, with its template.
            progress: shows a note if the template has no place for what a task says to the system.
            system_instruction: the user's own, which must not be lost.

        Raises:
            UserError: the folder has no chat template, or it cannot be read.
        """
        templates, tokens = chat_templates(folder)
        if "default" not in templates:
            others = f", only {', '.join(templates)}" if templates else ""
            raise UserError(
                f"eval.apply_chat_template=true, but the tokenizer at '{folder}' has no chat template{others}.",
                todo="Set eval.apply_chat_template=false, or use the instruction-tuned model.",
            )
        self.template = templates["default"]
        self._renderer = Renderer(self.template, tokens)
        self._instruction, self._progress, self._noted = system_instruction, progress, False

    def render(self, messages: Sequence[dict[str, str]], *, answers: bool = True) -> str:
        """Return the prompt.

        A template that refuses the messages gets them again without the one to the system, as in lm-eval: Gemma's has
        no place for it.

        Args:
            messages: as lm-eval makes them.
            answers: the assistant's answer follows; else the last message is the beginning of it.

        Raises:
            UserError: the template refuses the messages, has no place for the system instruction, or was stopped.
        """
        try:
            return self._rendered(messages, answers=answers)
        except NoPromptError as fault:
            others = [message for message in messages if message["role"] != "system"]
            if fault.code is not None or len(others) == len(messages):
                raise _unusable(fault) from None
            why = str(fault)
        if self._instruction is not None:
            raise UserError(
                f"eval.system_instruction has no effect: the model's chat template {why}.",
                todo="Leave it out, or use a model whose template has a place for it.",
            )
        if not self._noted:
            self._progress.note(f"The chat template {why}; the task's system text is dropped, as in lm-eval")
            self._noted = True
        try:
            return self._rendered(others, answers=answers)
        except NoPromptError as fault:
            raise _unusable(fault) from None

    def _rendered(self, messages: Sequence[dict[str, str]], *, answers: bool) -> str:
        # Transformers gives every template these two, so that "is not none" means the same
        values = {"tools": None, "documents": None, "add_generation_prompt": answers}
        if answers:
            return self._renderer.render(messages, values)
        *before, last = messages
        text = self._renderer.render([*before, {**last, "content": last["content"] + TAG}], values)
        start, tag, _ = text.rpartition(TAG.strip())
        if not tag or last["content"].strip() not in text:
            raise NoPromptError("leaves out parts of the last message, which the model is to continue")
        return start if text.startswith(TAG, len(start)) else start.rstrip()


def _unusable(fault: NoPromptError) -> UserError:
    return UserError(
        f"The model's chat template {fault}.",
        todo="Set eval.apply_chat_template=false, or correct the template in the model's folder.",
    )
