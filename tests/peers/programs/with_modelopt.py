"""ModelOpt in one of its formats, by its export of Hugging Face folders."""

from typing import Any

import modelopt.torch.quantization as mtq
import torch
from common import OUT, SOURCE, TEXTS, WORDS, write
from modelopt.torch.export import export_hf_checkpoint, unified_export_hf
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

WEIGHTS: dict[int, Any] = {}
"""The weight of each linear, taken when it is packed, since scales are merged just before."""


def main() -> None:
    (form,) = WORDS
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(SOURCE, dtype="float32"),
        AutoTokenizer.from_pretrained(SOURCE),
    )

    def calibrate(model: Any) -> None:
        for text in TEXTS[:2]:
            model(**tokenizer(text, return_tensors="pt"))

    pack = unified_export_hf._export_quantized_weight

    def simulated_and_packed(linear: Any, dtype: Any, weight_name: str = "weight") -> None:
        shape = linear.weight.shape
        with torch.no_grad():
            if form == "INT4_AWQ":
                WEIGHTS[id(linear)] = linear.weight_quantizer(linear.weight)
            pack(linear, dtype, weight_name)
            if form == "FP8_DEFAULT":
                packed = FP8QTensor(shape, torch.float32, linear.weight)
                WEIGHTS[id(linear)] = packed.dequantize(scale=linear.weight_scale)
            elif form == "NVFP4_DEFAULT":
                scales = {"scale": linear.weight_scale, "double_scale": linear.weight_scale_2, "block_sizes": {-1: 16}}
                WEIGHTS[id(linear)] = NVFP4QTensor(shape, torch.float32, linear.weight).dequantize(**scales)

    unified_export_hf._export_quantized_weight = simulated_and_packed
    mtq.quantize(model, getattr(mtq, f"{form}_CFG"), calibrate)
    export_hf_checkpoint(model, export_dir=OUT)
    tokenizer.save_pretrained(OUT)
    write({name: WEIGHTS[id(module)] for name, module in model.named_modules() if id(module) in WEIGHTS})


if __name__ == "__main__":
    main()
