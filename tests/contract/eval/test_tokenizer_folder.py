"""The tokens, the ends and the chats of a folder are those that Transformers makes of its serialized tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from eval.adapter import ChatPrompts, EngineLM, load_tokenizer
from eval.diagnose.run import DiagnosedFolders, _Work
from eval.diagnose.servers import MESSAGES, Item, make_items
from pipelines.checkpoint.tokenizer_folder import TokenizerFaultError, TokenizerFolder
from pipelines.compress.loading import load_tokenizer as for_calibration
from pipelines.compress.model_folder import look_at
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.settings.model import BUNDLED
from tests.unit.models.conftest import load  # noqa: F401 - a fixture

LAW = transformers.PreTrainedTokenizerFast
END = "<|im_end|>"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
TOKEN = {"content": END, **FLAGS}
TEXTS = ("The capital of the", f"The capital{END} of", " Forbrux<|end_of_text|> is", "<image><tool>a", "")
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye <|end_of_text|>"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
BODY = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
PLAIN = "{{ bos_token }}" + BODY
TAGGED = PLAIN.replace("{{ m.content }}", "{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}")
FOR_TOOLS = "{{ tools | tojson(indent=2) }}<tool_call>" + PLAIN
EVERY = "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ image_token }}|{% if tools is none %}no{% endif %}" + BODY
SORTED = "{{ messages | tojson(sort_keys=true, separators=[',', ':']) }}"

Change = Callable[[Path], None]


def write(file: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)

    return change


def edit(file: str = "tokenizer_config.json", drop: tuple[str, ...] = (), **changes: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        kept = {key: value for key, value in content.items() if key not in drop}
        (folder / file).write_text(json.dumps(kept | changes))

    return change


def gone(*files: str) -> Change:
    def change(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return change


def ends_with_eos(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["post_processor"]["single"].append({"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}})
    raw["post_processor"]["special_tokens"]["<|end_of_text|>"] = {
        "id": "<|end_of_text|>", "ids": [1767], "tokens": ["<|end_of_text|>"],
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))


NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
LAYOUTS: dict[str, tuple[Change, ...]] = {
    "as it is": (),
    "llama 3": (edit(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True),),
    "deepseek r1 distill llama": (edit(tokenizer_class="LlamaTokenizerFast", legacy=True, add_prefix_space=None),),
    "llama tokenizer, as transformers 5 names it": (edit(tokenizer_class="LlamaTokenizer"),),
    "saved by transformers 5": (edit(tokenizer_class="TokenizersBackend", backend="tokenizers"),),
    "qwen": (edit(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, split_special_tokens=False),),
    "axolotl, chatml": (
        edit(eos_token=END, added_tokens_decoder={"1769": TOKEN}, chat_template=PLAIN),
        edit("special_tokens_map.json", eos_token=END),
    ),
    "lora merged: added_tokens.json": (
        edit(eos_token=END), edit("special_tokens_map.json", eos_token=END),
        write("added_tokens.json", json.dumps({END: 1769})),
    ),
    "added_tokens.json of an ordinary token": (write("added_tokens.json", json.dumps({"<tool>": 1769, END: 1770})),),
    "zephyr: objects as tokens": (edit("special_tokens_map.json", eos_token=TOKEN, additional_special_tokens=[END]),),
    "additional_special_tokens": (edit(additional_special_tokens=[END, "<tool>"]),),
    "extra_special_tokens": (edit(extra_special_tokens=[END]),),
    "extra_special_tokens by name": (edit(extra_special_tokens={"image_token": "<image>"}),),
    "both lists": (
        edit(additional_special_tokens=["<tool>"]), edit("special_tokens_map.json", additional_special_tokens=[END]),
    ),
    "model_specific_special_tokens": (edit(model_specific_special_tokens={"image_token": "<image>"}),),
    "an end that is no special token": (
        edit(eos_token=END, added_tokens_decoder={"1769": TOKEN | {"special": False}}),
    ),
    "a token at the number of another": (edit(added_tokens_decoder={"5": TOKEN}),),
    "a known token that eats spaces": (
        edit(added_tokens_decoder={"1767": TOKEN | {"content": "<|end_of_text|>", "lstrip": True, "rstrip": True}}),
    ),
    "a word as a token": (
        edit(added_tokens_decoder={"1769": TOKEN | {"content": "capital", "special": False, "single_word": True}}),
    ),
    "numbers with gaps": (write("added_tokens.json", json.dumps({"<tool>": 2000, END: 1990})),),
    "both lists of added tokens": (
        edit(added_tokens_decoder={"1769": TOKEN}), write("added_tokens.json", json.dumps({"<tool>": 1770})),
    ),
    "a prefix space that is not there": (edit(add_prefix_space=True, tokenizer_class="LlamaTokenizerFast"),),
    "loop controls": (
        edit(
            chat_template="{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}"
            "{% break %}{% endfor %}"
        ),
    ),
    "an empty file replaces the template": (edit(chat_template=BODY), write("chat_template.jinja", "")),
    "a token of the model's own": (edit(image_token="<image>", chat_template=EVERY),),
    "tokens in special_tokens_map.json alone": (edit(drop=NAMES, chat_template=EVERY),),
    "decoder beside another map": (
        edit(added_tokens_decoder={"1769": TOKEN}), edit("special_tokens_map.json", eos_token=END),
    ),
    "null beside special_tokens_map.json": (edit(eos_token=None),),
    "no end": (edit(drop=("eos_token", "pad_token")), gone("special_tokens_map.json")),
    "no special tokens": (edit(drop=NAMES), gone("special_tokens_map.json")),
    "no tokenizer_config.json": (gone("tokenizer_config.json"),),
    "nothing but tokenizer.json": (gone("tokenizer_config.json", "special_tokens_map.json"),),
    "the tokenizer adds an end": (ends_with_eos, edit(chat_template=PLAIN)),
    "add_bos_token=false beside tokenizer.json": (edit(add_bos_token=False, add_eos_token=True),),
    "special tokens of a text are text": (edit(split_special_tokens=True),),
    "phi 3: an end that eats spaces": (edit(added_tokens_decoder={"1769": TOKEN | {"rstrip": True}}, eos_token=END),),
    "template without BOS": (edit(chat_template=BODY),),
    "BOS after a line": (edit(chat_template="\n" + PLAIN),),
    "generation tags": (edit(chat_template=TAGGED),),
    "templates by name": (
        edit(chat_template=[{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": FOR_TOOLS}]),
    ),
    "templates as an object": (edit(chat_template={"default": PLAIN, "tool_use": FOR_TOOLS, "rag": BODY}),),
    "chat_template.jinja wins": (edit(chat_template=BODY), write("chat_template.jinja", PLAIN)),
    "additional_chat_templates": (
        write("chat_template.jinja", PLAIN), write("additional_chat_templates/tool_use.jinja", FOR_TOOLS),
    ),
    "a file replaces all templates by name": (
        edit(chat_template={"default": BODY, "tool_use": BODY}), write("chat_template.jinja", PLAIN),
    ),
    "all special tokens": (edit(chat_template=EVERY),),
    "tojson as transformers has it": (edit(chat_template=SORTED),),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, found = tmp_path_factory.mktemp("layouts"), {}
    for number, (name, changes) in enumerate(LAYOUTS.items()):
        folder = Path(shutil.copytree(BUNDLED / "models" / "tiny_llama", root / str(number)))
        for change in changes:
            change(folder)
        found[name] = folder
    return found


def test_everybody_reads_the_tokens_that_transformers_reads(folders, load):  # noqa: F811
    """Evaluation, calibration, the service and the Triton models, from one reader."""
    preprocessing = load("preprocessing")
    for name, folder in folders.items():
        theirs, served = LAW.from_pretrained(folder), ServedTokenizer(folder, adds_special=True)
        evaluated, calibrated = load_tokenizer(folder), for_calibration(look_at(folder))
        triton = preprocessing.open_tokenizer(folder)
        for text in TEXTS:
            right = theirs.encode(text)
            for who, ids in {
                "evaluation": evaluated.encode(text), "calibration": calibrated(text)["input_ids"],
                "service": served.ids(text), "triton": triton.encode(text, True),
            }.items():  # fmt: skip
                assert ids == right, (name, who, text)
            assert served.ids(text, special=False) == theirs.encode(text, add_special_tokens=False), name
            assert evaluated.decode(right, skip_special_tokens=True) == theirs.decode(
                right, skip_special_tokens=True
            ), name
        for token in ("eos_token_id", "bos_token_id", "pad_token_id"):
            assert getattr(evaluated, token) == getattr(theirs, token), (name, token)
        assert served.pad_id == theirs.pad_token_id, name
        assert served.end_id == triton.end_id == (1767 if theirs.eos_token_id is None else theirs.eos_token_id), name


def test_the_class_that_is_named_changes_nothing(folders):
    """`AutoTokenizer` of Transformers 5 rebuilds a byte-level tokenizer as LlamaTokenizer, with other ids."""
    plain = load_tokenizer(folders["as it is"]).encode(TEXTS[0])
    for name in ("deepseek r1 distill llama", "llama tokenizer, as transformers 5 names it", "qwen"):
        assert load_tokenizer(folders[name]).encode(TEXTS[0]) == plain
    assert transformers.AutoTokenizer.from_pretrained(folders["as it is"]).encode(TEXTS[0]) == plain


def test_chats_are_rendered_and_read_as_transformers_does(folders):
    rendered = 0
    for name, folder in folders.items():
        theirs = LAW.from_pretrained(folder)
        if not theirs.chat_template:
            continue
        ours, served = ChatTemplate.load(folder), ServedTokenizer(folder, adds_special=True)
        for tools in (None, TOOLS):
            asked = {"tools": tools, "add_generation_prompt": False}
            text = ours.render(CHAT, asked)
            assert text == theirs.apply_chat_template(CHAT, tools=tools, tokenize=False), (name, tools)
            ids = theirs.apply_chat_template(CHAT, tools=tools, tokenize=True, return_dict=False)
            assert served.ids(text) == ids, (name, tools)
            rendered += 1
    assert rendered >= 28


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1767, 13]}, {}, (1767, 13)),
        ({"eos_token_id": [13, 1767]}, {}, (1767, 13)),
        ({"eos_token_id": 13}, {}, (1767, 13)),
        ({}, {"eos_token_id": [1767, 13]}, (1767, 13)),
        (None, {"eos_token_id": 13}, (1767, 13)),
        (None, {"eos_token_id": None}, (1767,)),
    ],
)
def test_every_end_counts_everywhere(tmp_path, load, generation, config, ends):  # noqa: F811
    folder = changed(tmp_path, edit("config.json", **config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        write("generation_config.json", json.dumps(generation))(folder)
    served, evaluated = ServedTokenizer(folder, adds_special=True), load_tokenizer(folder)
    lm = EngineLM(None, evaluated, 1024, SilentProgress())
    assert served.end_ids == load("preprocessing").open_tokenizer(folder).end_ids == ends
    assert lm._ends == ends


def test_a_tokenizer_without_an_end_is_evaluated_with_the_models(folders):
    lm = EngineLM(None, load_tokenizer(folders["no end"]), 1024, SilentProgress())
    assert lm.eot_token_id == 1767
    assert lm._ends == (1767,)


def test_texts_of_byte_pairs_are_written_as_transformers_writes_them_and_without_its_warning(tmp_path):
    """Transformers 5 ignores clean_up_tokenization_spaces for BPE, and warns in the middle of a command's output."""
    folder = changed(tmp_path, edit(clean_up_tokenization_spaces=True))
    ids = load_tokenizer(folder).encode("Yes , it is not .", add_special_tokens=False)
    assert load_tokenizer(folder).clean_up_tokenization_spaces is False
    assert load_tokenizer(folder).decode(ids) == LAW.from_pretrained(folder).decode(ids) == "Yes , it is not ."


ENDS_OF_THE_MODEL = (
    edit(drop=("eos_token", "pad_token")), gone("special_tokens_map.json"),
    edit("config.json", eos_token_id=None), edit("generation_config.json", eos_token_id=[13, 1767]),
)  # fmt: skip


def changed(root: Path, *changes: Change) -> Path:
    folder = Path(shutil.copytree(BUNDLED / "models" / "tiny_llama", root / "model"))
    for change in changes:
        change(folder)
    return folder


def chats(folder: Path) -> list[Item]:
    made = make_items(load_tokenizer(folder), BUNDLED / "corpus.jsonl", 1, 200, folder, None)
    return [item for item in made if item.messages is not None]


@pytest.mark.parametrize("plain", [PLAIN, BODY, EVERY])
def test_diagnosis_evaluation_and_service_ask_the_same(tmp_path, plain):
    """Ends that only generation_config.json names, and a template for tools beside the default one."""
    named = [{"name": "tool_use", "template": FOR_TOOLS}, {"name": "default", "template": plain}]
    folder = changed(tmp_path, *ENDS_OF_THE_MODEL, edit(chat_template=named))
    served, prompts = ServedTokenizer(folder, adds_special=True), ChatPrompts(folder, SilentProgress())
    lm = EngineLM(None, load_tokenizer(folder), 1024, SilentProgress(), chat=prompts)
    diagnosed = _Work(DiagnosedFolders(folder, folder, BUNDLED / "corpus.jsonl"), 1, 8, SilentProgress())
    assert diagnosed.ends == lm._ends == served.end_ids == (13, 1767)
    found = chats(folder)
    for text, item in zip(MESSAGES, found, strict=True):
        messages = [{"role": "user", "content": text}]
        assert list(item.ids) == served.ids(ChatTemplate.load(folder).render(messages))
        assert list(item.ids) == lm.tok_encode(prompts.render(messages))
        # the Triton models add BOS to every text, so that none stands for a chat without it
        assert item.text == "" if plain == BODY else served.ids(item.text) == list(item.ids)


def test_a_template_for_tools_alone_is_no_template_for_chats(tmp_path):
    folder = changed(tmp_path, edit(chat_template={"tool_use": FOR_TOOLS}))
    assert chats(folder) == []
    with pytest.raises(UserError, match="has no chat template, only tool_use"):
        ChatPrompts(folder, SilentProgress())
    with pytest.raises(ApiError, match="no chat template"):
        ChatTemplate.load(folder).render(CHAT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((gone("tokenizer.json"),), r"has no tokenizer\.json\. Make one .*save_pretrained"),
        ((gone("tokenizer.json"), write("tekken.json", "{}")), r"no tokenizer\.json, only tekken\.json"),
        ((write("tokenizer.json", "{}"),), r"tokenizer\.json is not a tokenizer"),
        ((write("added_tokens.json", "[1]"),), r"added_tokens\.json is not a JSON object"),
        ((write("added_tokens.json", '{"a": "b"}'),), "An added token has the number 'b'"),
        ((edit(added_tokens_decoder={"1": "x"}),), "An added token is 'x'"),
        ((edit("generation_config.json", eos_token_id="</s>"),), r"generation_config\.json has eos_token_id='</s>'"),
        ((write("special_tokens_map.json", "{"),), r"special_tokens_map\.json is not valid JSON"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path, changes, message):
    folder = changed(tmp_path, *changes)
    with pytest.raises(TokenizerFaultError, match=message):
        TokenizerFolder(folder).end_ids  # noqa: B018 - reading it is what fails
    with pytest.raises(UserError, match=message):
        ServedTokenizer(folder, adds_special=True)
    if "eos_token_id" not in message:
        with pytest.raises(UserError, match=message):
            load_tokenizer(folder)
