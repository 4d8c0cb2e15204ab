"""A tiny model repository: `ensemble` and `tensorrt_llm` answer with the prompt's words, again and again."""

import json
from pathlib import Path

CONFIG = """
name: "ensemble"
backend: "python"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [1] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [1] },
  { name: "stop_words" data_type: TYPE_STRING dims: [-1] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "top_p" data_type: TYPE_FP32 dims: [1] optional: true },
  { name: "temperature" data_type: TYPE_FP32 dims: [1] optional: true },
  { name: "presence_penalty" data_type: TYPE_FP32 dims: [1] optional: true },
  { name: "frequency_penalty" data_type: TYPE_FP32 dims: [1] optional: true },
  { name: "top_k" data_type: TYPE_INT32 dims: [1] optional: true },
  { name: "seed" data_type: TYPE_UINT64 dims: [1] optional: true },
  { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [-1] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [1] },
  { name: "num_output_tokens" data_type: TYPE_INT32 dims: [1] }
]
instance_group [{ kind: KIND_CPU count: 1 }]
"""

MODEL = '''
import threading, time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


def value(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    """Token = word. A word `sleep` takes 100 ms, `end` ends the text, `full` and `long` are refused."""

    def initialize(self, args):
        self.log = Path(args["model_repository"]).parent / "seen.txt"

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        words = value(request, "text_input", b"").decode().split()
        if "full" in words or "long" in words:
            text, kind = ("Exceeds maximum queue size 4", pb.TritonError.UNAVAILABLE) if "full" in words else (
                "Prompt length (5000) exceeds maximum input length (4096).", pb.TritonError.INTERNAL)
            sender.send(pb.InferenceResponse(error=pb.TritonError(text, kind)), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        limit, stream = int(value(request, "max_tokens", 0)), bool(value(request, "stream", False))
        seed = int(value(request, "seed", 0))
        stops = pb.get_input_tensor_by_name(request, "stop_words")
        stops = [] if stops is None else [word.decode() for word in stops.as_numpy().reshape(-1) if word]
        made, text = 0, "" if value(request, "exclude_input_in_output", False) else " ".join(words)
        for number in range(limit):
            word = words[(number + seed) % len(words)]
            if word == "end" or request.is_cancelled():
                break
            time.sleep(0.1 if word == "sleep" else 0)
            made, text = made + 1, text + " " + word
            if word in stops:
                break
            if stream:
                self.send(sender, text, len(words), 1)
                text = ""
        if request.is_cancelled():
            self.log.write_text(f"cancelled after {made}")
        if not stream:
            self.send(sender, text, len(words), made)
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, text, asked, made):
        sender.send(pb.InferenceResponse([
            pb.Tensor("text_output", np.array([[text.encode()]], dtype=object)),
            pb.Tensor("num_input_tokens", np.array([[asked]], dtype=np.int32)),
            pb.Tensor("num_output_tokens", np.array([[made]], dtype=np.int32)),
        ]))
'''


ENGINE_CONFIG = """
name: "tensorrt_llm"
backend: "python"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [-1] },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [1] },
  { name: "stop_words_list" data_type: TYPE_INT32 dims: [2, -1] optional: true },
  { name: "embedding_bias" data_type: TYPE_FP32 dims: [-1] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "runtime_top_p" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "runtime_top_k" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "temperature" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "presence_penalty" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "frequency_penalty" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "repetition_penalty" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "min_tokens" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "end_id" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "pad_id" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "seed" data_type: TYPE_UINT64 dims: [1] reshape: { shape: [] } optional: true },
  { name: "lora_task_id" data_type: TYPE_UINT64 dims: [1] reshape: { shape: [] } optional: true },
  { name: "return_log_probs" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "return_generation_logits" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "return_context_logits" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "streaming" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] },
  { name: "sequence_length" data_type: TYPE_INT32 dims: [-1] },
  { name: "output_log_probs" data_type: TYPE_FP32 dims: [-1, -1] },
  { name: "generation_logits" data_type: TYPE_FP32 dims: [-1, -1, -1] },
  { name: "context_logits" data_type: TYPE_FP32 dims: [-1, -1] }
]
instance_group [{ kind: KIND_CPU count: 1 }]
"""

ENGINE = '''
import threading, time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb

WORDS = __WORDS__
VOCABULARY = len(WORDS)


def value(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    """As `ensemble`, in tokens; the log probability of the n-th is -n / 8, and its logits favour the neighbours."""

    def initialize(self, args):
        self.log = Path(args["model_repository"]).parent / "seen.txt"
        self.stopped = set()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        if value(request, "stop", False):
            self.stopped.add(request.request_id())
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        ids = pb.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
        prompt = [WORDS[each] for each in ids if each != WORDS.index("<bos>")]
        if "full" in prompt or "long" in prompt:
            text, kind = ("Exceeds maximum queue size 4", pb.TritonError.UNAVAILABLE) if "full" in prompt else (
                "Prompt length (5000) exceeds maximum input length (4096).", pb.TritonError.INTERNAL)
            sender.send(pb.InferenceResponse(error=pb.TritonError(text, kind)), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        bias = pb.get_input_tensor_by_name(request, "embedding_bias")
        if bias is not None:
            prompt = [WORDS[int(bias.as_numpy().reshape(-1).argmax())]]
        limit, stream = int(value(request, "request_output_len", 0)), bool(value(request, "streaming", False))
        seed, end = int(value(request, "seed", 0)), int(value(request, "end_id", -1))
        seed += int(value(request, "lora_task_id", 0))  # an adapter begins as many words later as its id says
        made = []
        for number in range(limit):
            word = prompt[(number + seed) % len(prompt)]
            if word == "end" and end >= 0 or request.request_id() in self.stopped:
                break
            time.sleep(0.1 if word == "sleep" else 0)
            made.append(WORDS.index(word))
            if stream:
                self.send(request, sender, made[-1:], len(made))
        if request.request_id() in self.stopped:
            self.log.write_text(f"stopped after {len(made)}")
        if not stream:
            self.send(request, sender, made, len(made))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, request, sender, new, total):
        tensors = [
            pb.Tensor("output_ids", np.array([[new]], dtype=np.int32)),
            pb.Tensor("sequence_length", np.array([[len(new)]], dtype=np.int32)),
        ]
        if value(request, "return_log_probs", False):
            so_far = -np.arange(1, total + 1, dtype=np.float32) / 8
            tensors.append(pb.Tensor("output_log_probs", so_far[None, None]))
        if value(request, "return_generation_logits", False):
            logits = -np.abs(np.arange(VOCABULARY) - np.array(new)[:, None]).astype(np.float32)
            tensors.append(pb.Tensor("generation_logits", logits[None, None]))
        sender.send(pb.InferenceResponse(tensors))
'''


def write_model(repository: Path, name: str, config: str, model: str) -> Path:
    """Write one python model and return the repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(model)
    return repository


def write_echo(repository: Path) -> Path:
    """Write the echoing `ensemble`."""
    return write_model(repository, "ensemble", CONFIG, MODEL)


def write_failing(repository: Path, statement: str) -> Path:
    """Write a model `broken` whose initialize executes `statement`."""
    config = CONFIG.replace('"ensemble"', '"broken"')
    body = f"class TritonPythonModel:\n    def initialize(self, args):\n        {statement}\n"
    return write_model(repository, "broken", config, body)


STUBBORN = """
import threading, time


class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=time.sleep, args=(1000,)).start()  # the interpreter waits for it when it ends

    def execute(self, requests):
        return []
"""


def write_stubborn(repository: Path) -> Path:
    """Write a model `stubborn`, whose process hangs when it is asked to end."""
    return write_model(repository, "stubborn", CONFIG.replace('"ensemble"', '"stubborn"'), STUBBORN)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last message is not the user\\'s') }}{% endif %}"
    "{% if tools %}tools {% endif %}{% if loud %}{{ loud }} {% endif %}"
    "{% if add_generation_prompt %}assistant :{% endif %}{# calls are <tool_call>JSON</tool_call> #}"
)


WORDS = (
    *("<unk>", "<bos>", "<eos>", "a", "b", "c", "d", "e", "x", "y", "hi", "end", "sleep", "full", "long", "user", ":"),
    *("assistant", "system", "words", "tools", "get_weather", "<tool_call>", "</tool_call>", "weather?", "bé"),
    '{"name":"get_weather","arguments":{"city":"Ulm"}}',
)


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of words that puts <bos> in front, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_served_echo(repository: Path) -> Path:
    """Write `ensemble` and `tensorrt_llm` with a tokenizer and limits, as the OpenAI service needs them."""
    write_echo(repository)
    write_model(repository, "tensorrt_llm", ENGINE_CONFIG, ENGINE.replace("__WORDS__", repr(WORDS)))
    write_model(repository, "preprocessing", CONFIG.replace('"ensemble"', '"preprocessing"'), MODEL)
    write_tokenizer(repository / "preprocessing" / "1" / "tokenizer")
    (repository / "repository.json").write_text(json.dumps({"label": "echo", "limits": {"max_seq_len": 64}}))
    return repository
