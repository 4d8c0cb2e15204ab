"""The only module that imports peft. Import it only where it is used: users of other features need not have it."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import Linear

from pipelines.compress.config import RecoverSettings
from pipelines.domain.errors import UserError

_ADAPTER = "default"


def with_adapters(model: torch.nn.Module, recover: RecoverSettings) -> torch.nn.Module:
    """Freeze a model and add trainable low-rank branches to the linears of its layers; its modules are changed.

    Raises:
        UserError: the layers have no such linear, or the rank is larger than one of them.
    """
    rank = recover.lora_rank
    assert rank is not None, "nobody asks otherwise"
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    in_layers = {name: linear for name, linear in linears.items() if ".layers." in f".{name}"}
    linear_names = sorted({name.rpartition(".")[2] for name in in_layers})
    if missing := [target for target in recover.targets if target not in linear_names]:
        raise UserError(
            f"recover.lora_targets={missing[0]} is not a linear of the model's layers.",
            allowed=f"They are {', '.join(linear_names)}.",
        )
    targets = {name: linear for name, linear in in_layers.items() if name.rpartition(".")[2] in recover.targets}
    for name, linear in targets.items():
        if rank > min(linear.weight.shape):
            out, inputs = linear.weight.shape
            raise UserError(
                f"recover.lora_rank={rank} is larger than the weight of '{name}', which is {out} x {inputs}.",
                allowed=f"At most {min(linear.weight.shape)} for it.",
            )
    options: dict[str, Any] = {"r": rank, "lora_alpha": recover.alpha, "target_modules": list(targets)}
    config = LoraConfig(**options, lora_dropout=0.0, bias="none")
    adapted: torch.nn.Module = get_peft_model(model, config)
    return adapted


def delta(module: torch.nn.Module) -> torch.Tensor | None:
    """Return what the low-rank branch of a linear adds to its weight, [O, I]; None without one."""
    return module.get_delta_weight(_ADAPTER) if isinstance(module, Linear) else None


def load(model: torch.nn.Module, folder: Path) -> None:
    """Read trained branches as the Trainer has saved them."""
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), adapter_name=_ADAPTER)
