"""Resident memory of the processes beside the CPU engine's (modelled).

Measured as anonymous pages, which the kernel cannot reclaim, with tiny_llama (CPython 3.11, x86-64), and for tokenizers
with BPE vocabularies of 32,000 to 151,000 tokens.
"""

from pipelines.domain.units import MIB

TOKENIZER = 1100
"""Bytes for each token of the vocabulary, in each process that tokenizes or detokenizes."""
SERVER, PYTHON_MODEL = 20 * MIB, 18 * MIB
"""tritonserver with what ends it, and each process of a model in Python."""
SERVE, BENCHMARK = 58 * MIB, 186 * MIB
"""Of `make serve` itself, and of `make benchmark` with one client process, where all that they need is in the store."""
FRONT, FRONT_TOKENIZERS = 146 * MIB, 2
"""The OpenAI service and the process that reads large bodies, each with a tokenizer and two processes for templates."""
LM_EVAL = 221 * MIB
"""lm-eval, Transformers and PyTorch in the engine's process."""


def triton_memory(vocabulary: int, *, tokenizing: int, others: int, benchmarks: bool) -> float:
    """Return the bytes of tritonserver, its models in Python without the engine, and the command that runs it.

    Args:
        vocabulary: tokens.
        tokenizing: processes that tokenize or detokenize.
        others: further processes.
        benchmarks: whether the command does.
    """
    models = PYTHON_MODEL * (tokenizing + others) + TOKENIZER * vocabulary * tokenizing
    return SERVER + models + (BENCHMARK if benchmarks else SERVE)


def front_memory(vocabulary: int) -> float:
    """Return the bytes of the OpenAI service."""
    return FRONT + FRONT_TOKENIZERS * TOKENIZER * vocabulary


def evaluation_memory(vocabulary: int) -> float:
    """Return the bytes that an evaluation adds to the engine's process."""
    return LM_EVAL + TOKENIZER * vocabulary
