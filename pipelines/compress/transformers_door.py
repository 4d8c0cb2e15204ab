"""The door of compression to Transformers. Import it only where it is used: it takes some seconds."""

import transformers
from transformers import AutoConfig as AutoConfig
from transformers import AutoModelForCausalLM as AutoModelForCausalLM
from transformers import DynamicCache as DynamicCache
from transformers import GenerationConfig as GenerationConfig
from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.utils import logging as logging

VERSION: str = transformers.__version__
MAJOR = int(VERSION.partition(".")[0])
