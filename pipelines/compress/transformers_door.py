"""The door of compression to Transformers. Import it only where it is used: it takes some seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without_scikit_learn() -> Iterator[None]:
    """Spare a third of the import's time: Transformers would load it, with pandas, for one kind of generation."""
    loaded = sys.modules.get("sklearn")
    sys.modules["sklearn"] = None  # type: ignore[assignment] # which means that there is none
    try:
        yield
    finally:
        del sys.modules["sklearn"]
        if loaded is not None:
            sys.modules["sklearn"] = loaded


with _without_scikit_learn():
    import transformers
    from transformers import AutoConfig as AutoConfig
    from transformers import AutoModelForCausalLM as AutoModelForCausalLM
    from transformers import DynamicCache as DynamicCache
    from transformers import GenerationConfig as GenerationConfig
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
    from transformers.utils import logging as logging

VERSION: str = transformers.__version__
MAJOR = int(VERSION.partition(".")[0])
