"""torchao by Transformers, in eight bits."""

from common import OUT, SOURCE
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

settings = TorchAoConfig(Int8WeightOnlyConfig(version=2))
AutoModelForCausalLM.from_pretrained(SOURCE, quantization_config=settings).save_pretrained(OUT)
AutoTokenizer.from_pretrained(SOURCE).save_pretrained(OUT)
