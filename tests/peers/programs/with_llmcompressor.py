"""llm-compressor in one of its schemes."""

from common import OUT, SOURCE, TEXTS, WORDS, save_weights
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import CompressedTensorsConfig

(scheme,) = WORDS
model, tokenizer = AutoModelForCausalLM.from_pretrained(SOURCE), AutoTokenizer.from_pretrained(SOURCE)
recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
texts = Dataset.from_list([dict(tokenizer(text)) for text in TEXTS]) if scheme == "FP8" else None
oneshot(model=model, dataset=texts, recipe=recipe, num_calibration_samples=len(TEXTS))
model.save_pretrained(OUT, save_compressed=True)
tokenizer.save_pretrained(OUT)
settings = CompressedTensorsConfig(run_compressed=False)
own = AutoModelForCausalLM.from_pretrained(OUT, quantization_config=settings, dtype="float32")
save_weights(own, lambda linear: linear.weight)
