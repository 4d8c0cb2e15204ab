"""Models of which each process holds a part of every weight, by torch's `fully_shard` (FSDP).

The processes collect the weights of a decoder layer whenever it computes, and drop them afterwards. Each reads the
files layer by layer, so that none ever holds a whole model. accelerate would not shard on a CPU.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed import get_world_size
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipelines.compress.loading import hf_config
from pipelines.compress.model_folder import ModelFolder, ModelWeights, torch_dtype
from pipelines.compress.transformers_door import AutoModelForCausalLM
from pipelines.domain.errors import UserError

WEIGHTS, MOMENTS = "weights", "moments"
"""Folders of a checkpoint."""

Owners = dict[str, tuple[torch.nn.Module, str]]
"""Name of a weight in the files -> the module that has it, and its name there."""


def owners(model: torch.nn.Module) -> Owners:
    """Return who has each weight; tied ones have several names."""
    return {
        f"{prefix}.{name}": (module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def load_sharded(source: ModelFolder, dtype: str, device: str) -> torch.nn.Module:
    """Do what `load_model` does, of which this process then holds its part."""
    model = empty_model(source, dtype)
    shard(model, owners(model), source, device)
    return model


def empty_model(source: ModelFolder, dtype: str) -> torch.nn.Module:
    """Return a model on the CPU whose weights have types and shapes, but take no memory."""
    with init_empty_weights(include_buffers=False):
        built: Any = AutoModelForCausalLM.from_config(hf_config(source), dtype=torch_dtype(dtype))
    built.config.use_cache = False
    built.tie_weights()
    model: torch.nn.Module = built.eval()
    places: dict[int, torch.nn.Parameter] = {}
    for module, name in owners(model).values():
        weight = getattr(module, name)
        place = torch.empty((), dtype=weight.dtype).expand(weight.shape)
        setattr(module, name, places.setdefault(id(weight), torch.nn.Parameter(place, requires_grad=False)))
    return model


def shard(model: torch.nn.Module, named: Owners, source: ModelFolder, device: str) -> None:
    """Read the weights of an empty model, of which this process then holds its part.

    Args:
        model: to call; with low-rank branches peft's, whose own weights are shared as well.
        named: the weights of the empty model.
        source: where they are read.
        device: on which they are held.

    Raises:
        UserError: a weight is missing, is not finite or has another shape, or tied ones differ.
    """
    mesh, stored = init_device_mesh(torch.device(device).type, (get_world_size(),)), ModelWeights(source)
    names: dict[int, list[str]] = {}
    for name, (module, own) in named.items():
        names.setdefault(id(getattr(module, own)), []).append(name)
    read = {place: next((name for name in tied if name in stored), tied[0]) for place, tied in names.items()}
    stored.require({name: tuple(getattr(*named[name]).shape) for name in read.values()})
    layers = next(module for name, module in model.named_modules() if name.endswith(".layers"))
    for part in (*layers.children(), model):
        for place in [weight for weight in part.parameters() if id(weight) in names]:
            tied = names[id(place)]
            weight = torch.nn.Parameter(_read(stored, tied, place.dtype), requires_grad=place.requires_grad)
            for module, own in (named[name] for name in tied):
                setattr(module, own, weight)
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def _read(stored: ModelWeights, names: list[str], dtype: torch.dtype) -> torch.Tensor:
    """Read a weight that has several names if it is tied."""
    first, *others = [name for name in names if name in stored]
    weight = stored.tensor(first, dtype)
    for other in others:
        if not torch.equal(weight, stored.tensor(other, dtype)):
            raise UserError(
                f"{stored.folder} has a '{other}' that is not '{first}', but its config.json ties them.",
                todo="Remove the tensor, or set tie_word_embeddings=false in config.json.",
            )
    return weight


def collected(weight: torch.Tensor) -> torch.Tensor:
    """Return a whole weight; if the processes hold parts of it, all must ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def save_weights(model: torch.nn.Module, folder: Path) -> None:
    """Save the weights that are trained; each process writes its part."""
    save(_trained(model), checkpoint_id=folder / WEIGHTS)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Read the weights that are trained; each process reads its part."""
    load(_trained(model), checkpoint_id=folder / WEIGHTS)


def _trained(model: torch.nn.Module) -> dict[str, Any]:
    """Return this process's part of the weights that are trained; writing to it changes the model."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def save_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Save the optimizer's state; each process writes its part."""
    save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / MOMENTS)


def load_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the optimizer's state; each process reads its part."""
    state = get_optimizer_state_dict(model, optimizer)
    load(state, checkpoint_id=folder / MOMENTS)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state)
