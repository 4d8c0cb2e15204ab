"""optimum-quanto in eight bits."""

from common import OUT, SOURCE
from optimum.quanto import QuantizedModelForCausalLM, qint8
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(SOURCE)
QuantizedModelForCausalLM.quantize(model, weights=qint8, exclude="lm_head").save_pretrained(OUT)
AutoTokenizer.from_pretrained(SOURCE).save_pretrained(OUT)
