"""AutoRound in one of its formats: rounding alone, as its texts would come from the Hub."""

from typing import Any

from auto_round import AutoRound
from common import OUT, SOURCE, WORDS, computed, flatten, save_weights
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from transformers import AutoModelForCausalLM, AutoRoundConfig


def main() -> None:
    (form,) = WORDS
    rounder = AutoRound(SOURCE, scheme="W4A16", group_size=32, iters=0, disable_opt_rtn=True, device_map="cpu")
    rounder.quantize_and_save(OUT, format=form)
    flatten()
    own = AutoModelForCausalLM.from_pretrained(OUT, quantization_config=AutoRoundConfig(backend="torch"))
    save_weights(own, unpacked if form == "auto_awq" else computed)


def unpacked(linear: Any) -> Any:
    """Return the weight of GPTQModel's linear, which AutoRound takes for auto_awq; it computes in float16 itself."""
    tensors = {"qweight": linear.qweight, "qzeros": linear.qzeros, "scales": linear.scales.float()}
    return dequantize_gemm(**tensors, bits=linear.bits, group_size=linear.group_size).T


if __name__ == "__main__":  # its processes import this module again
    main()
