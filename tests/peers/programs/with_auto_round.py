"""AutoRound in one of its formats: rounding alone, as its texts would come from the Hub."""

from __future__ import annotations

from auto_round import AutoRound
from common import OUT, SOURCE, WORDS, flatten, save_weights
from transformers import AutoModelForCausalLM, AutoRoundConfig


def main() -> None:
    (form,) = WORDS
    rounder = AutoRound(SOURCE, scheme="W4A16", group_size=32, iters=0, disable_opt_rtn=True, device_map="cpu")
    rounder.quantize_and_save(OUT, format=form)
    flatten()
    save_weights(AutoModelForCausalLM.from_pretrained(OUT, quantization_config=AutoRoundConfig(backend="torch")))


if __name__ == "__main__":  # its processes import this module again
    main()
