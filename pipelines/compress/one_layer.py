"""One decoder layer of a model, as a complete model that ModelOpt can quantize and export.

The embedding and the output head of this model are small stand-ins: neither is ever quantized, so the streaming path
copies the real ones itself. Everything else, from the layer's weights to the final norm, is the model's own.

Shapes: B sequences, T tokens, H hidden size.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from pipelines.compress.calibration import CalibrationSet, PassEnded, checked
from pipelines.compress.loading import hf_config
from pipelines.compress.model_folder import EMBEDDING, HEAD, NORM, ModelFolder, ModelWeights, fill, raw, torch_dtype
from pipelines.compress.moments import AwqSearch
from pipelines.compress.transformers_door import AutoModelForCausalLM, GenerationConfig
from pipelines.domain.errors import UserError
from pipelines.host.files import sync

Arguments = dict[str, Any]
Inputs = Iterator[tuple[torch.Tensor, Arguments]]
"""What a layer is called with, batch by batch: hidden states [B, T, H], and all other arguments."""


class _LayerCalled(Exception):  # noqa: N818 - ends a forward pass, is not an error
    """Carries what the first layer was called with."""

    def __init__(self, hidden_bth: torch.Tensor, arguments: Arguments) -> None:
        super().__init__()
        self.hidden_bth, self.arguments = hidden_bth, arguments


class _Catch(torch.nn.Module):
    """Stands in the place of the first layer and ends the forward pass there."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.attention_type = kind  # Transformers 4 asks the layer itself

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> None:
        raise _LayerCalled(hidden_states, arguments)


class LayerSource:
    """The layers of a model folder, each loaded when asked for.

    Attributes:
        hidden_size: width of the states between layers.
        names: tensors of a layer, without the layer's prefix.
        dtype: in which they are loaded.
        device: on which layers compute.
        head: name of the tensor that is the output head: its own, or the embedding.
    """

    def __init__(
        self, source: ModelFolder, dtype: str, device: str, rows: int = 64, weights: ModelWeights | None = None
    ) -> None:
        """Check that the folder has every tensor; only a head that is said to be tied is read.

        Args:
            source: the model.
            dtype: "bfloat16", "float16" or "float32".
            device: "cpu" or "cuda".
            rows: of the stand-ins for embedding and head.
            weights: tensors of the folder, if they are not to be read as they are stored.

        Raises:
            UserError: a tensor is missing, or a head contradicts config.json.
        """
        self.weights, self.dtype, self.device = weights or ModelWeights(source), torch_dtype(dtype), device
        self._config, self._rows, self._folder = hf_config(source), rows, source.folder
        self._config.use_cache = False
        self.layers: int = self._config.num_hidden_layers
        self.hidden_size: int = self._config.hidden_size
        self._kinds: list[str] | None = getattr(self._config, "layer_types", None)
        self._skeletons: dict[str | None, Any] = {}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._empty_layers(0)[0].state_dict().items()}
        self.names = tuple(shapes)
        tied = bool(self._config.tie_word_embeddings)
        self.head = EMBEDDING if tied else HEAD
        table = (self._config.vocab_size, self.hidden_size)
        of_layers = {f"model.layers.{n}.{name}": shape for n in range(self.layers) for name, shape in shapes.items()}
        self.weights.require(of_layers | {EMBEDDING: table, NORM: (self.hidden_size,), self.head: table})
        self._head_is_embedding = HEAD not in self.weights or self.weights.same(EMBEDDING, HEAD, self.dtype)
        if tied and not self._head_is_embedding:
            raise UserError(
                f"{source.folder} has its own '{HEAD}', but its config.json has tie_word_embeddings=true.",
                todo="Remove the tensor, or set tie_word_embeddings=false in config.json.",
            )
        self._called_for: tuple[str | None, tuple[int, int]] | None = None
        self._arguments: Arguments = {}

    def load(self, number: int) -> Any:
        """Load layer `number` into a model of one layer, ready for inference.

        Raises:
            UserError: a weight is not finite.
        """
        model = self._without_layers(number)
        model.model.layers = self._empty_layers(number)
        layer = {name: self.weights.tensor(f"model.layers.{number}.{name}", self.dtype) for name in self.names}
        model.model.layers.load_state_dict({f"0.{name}": tensor for name, tensor in layer.items()}, assign=True)
        for module in model.modules():  # one configuration for all, as in a model that was built in one piece
            if hasattr(module, "config"):
                module.config = model.config
        model.model.norm.weight.data = self.weights.tensor(NORM, self.dtype)
        stand_in = torch.arange(self._rows, dtype=self.dtype)[:, None].repeat(1, self._config.hidden_size) / self._rows
        model.model.embed_tokens.weight.data = stand_in
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        else:
            # an exporter drops a head that equals the embedding in some families, so the stand-ins must be equal
            # exactly where the tensors are that they stand for
            model.lm_head.weight.data = stand_in.clone() if self._head_is_embedding else stand_in + 1
        return model.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def first_states(self, batch_bt: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer for token ids: [B, T, H]."""
        ids, compact_bt = torch.unique(batch_bt, return_inverse=True)
        frame = self._frame(0)
        frame.model.embed_tokens.weight.data = self.weights.gather(EMBEDDING, self.dtype, ids).to(self.device)
        return self._call(frame, input_ids=compact_bt.to(self.device)).hidden_bth

    @torch.no_grad()
    def arguments(self, number: int, shape: tuple[int, int]) -> Arguments:
        """Return what layer `number` is called with besides the hidden states of B x T tokens.

        Those of the last shape are kept: batches come sorted by length.
        """
        if self._called_for != (call := (self._kind(number), shape)):
            zeros = torch.zeros(*shape, self._config.hidden_size, dtype=self.dtype, device=self.device)
            self._arguments = self._call(self._frame(number), inputs_embeds=zeros).arguments
            self._called_for = call
        return self._arguments

    def _call(self, frame: Any, **inputs: torch.Tensor) -> _LayerCalled:
        try:
            frame.model(**inputs, use_cache=False)
        except _LayerCalled as called:
            return called
        raise AssertionError("unreachable: the only layer ends the pass")

    def _kind(self, number: int) -> str | None:
        """Return the kind of attention of a layer; None if all layers have the same."""
        return None if self._kinds is None else self._kinds[number]

    def _frame(self, number: int) -> Any:
        """Build a model that calls layer `number` and ends there."""
        frame = self._without_layers(number)
        frame.model.layers = torch.nn.ModuleList([_Catch(self._kind(number))])
        return frame

    def _without_layers(self, number: int) -> Any:
        """Build everything around layer `number`, with buffers as Transformers computes them."""
        kind = self._kind(number)
        if kind not in self._skeletons:
            # where layers differ, what is around them depends on their kinds, so one is built and thrown away
            model = self._build(0 if kind is None else 1, self._rows, kind).to(self.device).eval()
            model.model.layers = torch.nn.ModuleList()
            model.config.num_hidden_layers = 1
            generation = self._folder / "generation_config.json"
            if generation.is_file():
                model.generation_config = GenerationConfig.from_pretrained(str(self._folder))
            else:
                model.generation_config = GenerationConfig.from_model_config(self._config)
            self._skeletons[kind] = model
        return copy.deepcopy(self._skeletons[kind])

    def _empty_layers(self, number: int) -> torch.nn.ModuleList:
        """Build one layer without memory for its weights."""
        with torch.device("meta"):
            layers: torch.nn.ModuleList = self._build(1, 1, self._kind(number)).model.layers
        return layers

    def _build(self, layers: int, rows: int, kind: str | None) -> Any:
        config = copy.deepcopy(self._config)
        config.num_hidden_layers, config.vocab_size = layers, rows
        if kind is not None:
            config.layer_types = [kind] * layers
        config.pad_token_id = None  # it need not be below `rows`
        return AutoModelForCausalLM.from_config(config, dtype=self.dtype)


# Hidden states between two layers, on disk, and the passes that take them through a layer.
#
# They are on disk because calibration with 512 sequences of 512 tokens has 2 GiB of them in an 8B model, and because a
# run that was killed continues from them.


def _end_pass(_module: torch.nn.Module, _args: Any, states: torch.Tensor) -> None:
    raise PassEnded(states)


class HiddenStates:
    """The inputs of one layer after another.

    A calibration may run the model several times, and its second pass may already round the KV cache; so the states of
    each pass are kept apart, as they would be in a model that is whole.
    """

    def __init__(self, folder: Path, source: LayerSource, data: CalibrationSet) -> None:
        self._folder, self._source, self._data = folder, source, data

    def prepare(self, number: int) -> None:
        """Compute the inputs of layer `number` if it is the first one, and remove those of layers before it."""
        if number == 0:
            self.write(0, 1, map(self._source.first_states, self._data.batches))
        for path in self._folder.glob("states-*"):
            if int(path.name.split("-")[1]) < number:
                path.unlink()

    def passes(
        self, number: int, *, write: bool = True, cache_alone: bool = False, rounds_cache: bool = False
    ) -> Callable[[Any], None]:
        """Return what ModelOpt calls to run a model of one layer, which is layer `number`, over all batches.

        Each call is the next pass. It keeps the outputs as inputs of the next layer if `write` is true. Otherwise only
        its effect on the quantizers counts, and it ends within the layer if those of the KV cache are the only ones.
        If they are among them (`rounds_cache`), the second pass differs from the first.

        Raises:
            UserError: raised by the function if an activation is NaN or infinite; names the first module.
        """
        runs, search = itertools.count(1), AwqSearch(rereads=rounds_cache)

        def forward(model: Any) -> None:
            run, layer = next(runs), model.model.layers[0]

            def run_pass() -> None:
                if write:
                    self.write(number + 1, run, self.outputs(layer, number, run))
                    return
                last = layer.self_attn.v_bmm_quantizer if cache_alone else None
                with nullcontext() if last is None else last.register_forward_hook(_end_pass):
                    deque(self.outputs(layer, number, run), maxlen=0)

            with torch.no_grad():
                search.run(layer, run_pass)

        return forward

    def outputs(self, layer: torch.nn.Module, number: int, run: int) -> Iterator[torch.Tensor]:
        """Yield the outputs of layer `number` in pass `run`; errors as for `run_layer`."""
        for hidden, arguments in self.inputs(number, run):
            yield run_layer(layer, hidden, arguments, number)

    def inputs(self, number: int, run: int) -> Inputs:
        """Yield what layer `number` is called with in pass `run`, counted from 1."""
        path = self._path(number, run)
        if not path.exists():  # every pass begins with the same states
            path = self._path(number, 1)
        with path.open("rb", buffering=0) as file:
            for batch in self._data.batches:
                hidden = torch.empty(*batch.shape, self._source.hidden_size, dtype=self._source.dtype)
                fill(file, raw(hidden), path, "hidden states")
                yield hidden.to(self._source.device), self._source.arguments(number, (batch.shape[0], batch.shape[1]))

    def write(self, number: int, run: int, batches: Iterator[torch.Tensor]) -> None:
        """Write the inputs of a layer in pass `run`, so that they survive a power failure."""
        path = self._path(number, run)
        with path.open("wb") as file:
            for hidden in batches:
                file.write(raw(hidden))
        sync(path)

    def _path(self, number: int, run: int) -> Path:
        return self._folder / f"states-{number}-{run}"


def run_layer(layer: torch.nn.Module, hidden_bth: torch.Tensor, arguments: dict[str, Any], number: int) -> torch.Tensor:
    """Return the outputs of a layer, [B, T, H], or the states at which a hook has ended the pass.

    Raises:
        UserError: an activation is NaN or infinite; names the first module.
    """

    def run() -> torch.Tensor:
        try:
            result = layer(hidden_bth, **arguments)
        except PassEnded as ended:
            return ended.states
        states: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return states

    return checked(layer, run, lambda name: f"model.layers.{number}.{name}", f"model.layers.{number}")
