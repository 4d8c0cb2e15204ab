"""LLaVA folders: a CLIP encoder, a projector and a Llama or Mistral in one Hugging Face folder, read part by part.

Source: Transformers 5.14 `LlavaConfig`, `LlavaNextConfig` (LLaVA 1.6), `CLIPVisionConfig`, `LlamaConfig`,
`MistralConfig`, and their defaults, on which the folders rely for sizes of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.domain.errors import ConfigNumbers, Fault, UserError, refuse, shown
from pipelines.domain.language_model import LLAVA, LLAVA_NEXT, language_config, whole
from pipelines.host.files import json_object

if TYPE_CHECKING:
    from pipelines.checkpoint.pictures import Tiling

GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Of a LLaVA 1.6 whose config.json names none: what is equal to the default is not written there."""
NEWLINE = "image_newline"
MOST_TOKENS = 4096
"""Visual tokens of a picture: places of a row in `pipelines.engines.pictures`."""

_CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
ACTIVATIONS = ("gelu", "quick_gelu")


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of a CLIP encoder and the projector behind it.

    Attributes:
        image_size: pixels of a picture's side.
        patch_size: pixels of a patch's side.
        hidden_size: width of the encoder.
        intermediate_size: of its MLPs.
        heads: of its attention.
        layers: that run: features are those before the last ones.
        act: of the encoder's MLPs.
        projector_act: of the projector.
        epsilon: of its norms.
        keeps_class: whether the class token is a feature too.
        output_size: width of the language model.
        image_token: the place of a picture in a prompt.
        grids: of tiles, (height, width) in pixels; none in LLaVA 1.5.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    act: str
    projector_act: str
    epsilon: float
    keeps_class: bool
    output_size: int
    image_token: int
    grids: tuple[tuple[int, int], ...] = ()

    @property
    def tiling(self) -> "Tiling":
        """How pictures are cut for the encoder."""
        from pipelines.checkpoint.pictures import Tiling  # loads numpy, which planning does without

        return Tiling(self.image_size, (self.image_size // self.patch_size) ** 2 + self.keeps_class, self.grids)

    @property
    def visual_tokens(self) -> int:
        """Features of one picture: positions that it takes in a prompt, at most."""
        return self.tiling.most_tokens

    @property
    def weight_bytes(self) -> int:
        """Bytes of encoder and projector in 16 bit, without biases and norms."""
        hidden, patches = self.hidden_size, (self.image_size // self.patch_size) ** 2
        layer = 4 * hidden**2 + 2 * hidden * self.intermediate_size
        ends = (3 * self.patch_size**2 + patches + 1) * hidden + (hidden + self.output_size) * self.output_size
        return 2 * (self.layers * layer + ends)

    def activation_bytes(self, pictures: int) -> int:
        """Return the bytes of a layer's outputs and attention scores in 16 bit, of so many pictures at a time."""
        patches = (self.image_size // self.patch_size) ** 2 + 1
        tiles = pictures * self.tiling.most_tiles
        return 2 * tiles * patches * (7 * self.hidden_size + self.intermediate_size + self.heads * patches)

    @classmethod
    def read(cls, folder: Path) -> "VisionShape":
        """Read the folder of a whole LLaVA.

        Raises:
            UserError: it has no config.json, or one of another kind.
        """
        config = folder / "config.json"
        if not config.is_file():
            raise UserError(f"multimodal.path='{folder}' has no config.json.", todo="Give the folder of a LLaVA.")
        return cls.of(json_object(config), str(config))

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> "VisionShape":
        """Read the config.json of a whole LLaVA.

        Raises:
            UserError: it is none, or its encoder or projector is of another kind.
        """
        vision = config.get("vision_config")
        if whole(config) not in (LLAVA, LLAVA_NEXT) or not isinstance(vision, Mapping):
            raise UserError(
                f"{source} names the architectures {shown(config.get('architectures'))}.",
                allowed=f"Built are {LLAVA} and {LLAVA_NEXT} (LLaVA 1.5 and 1.6) with a vision_config.",
            )
        read = ConfigNumbers({**_CLIP, **vision}, source)
        _check_kinds(read, config, vision)
        text = ConfigNumbers(language_config(config, source), f"The text_config of {source}")
        token = config.get("image_token_index", config.get("image_token_id", 32000))
        if type(token) is not int or token < 0:
            read.fault(f"has image_token_index={shown(token)}.", "It must be the number of a token.")
            token = 0
        epsilon = read.config["layer_norm_eps"]
        if type(epsilon) not in (int, float):
            read.fault(f"has layer_norm_eps={shown(epsilon)}.", "It must be a number.")
            epsilon = 0
        layer, layers = config.get("vision_feature_layer", -2), read.size("num_hidden_layers")
        if type(layer) is not int or not -layers - 1 <= layer <= layers:
            read.fault(f"has vision_feature_layer={shown(layer)}.", f"It must be one of its {layers} layers.")
            layer = -1
        side = read.size("image_size")
        shape = cls(
            image_size=side,
            patch_size=read.size("patch_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size("intermediate_size"),
            heads=read.size("num_attention_heads"),
            layers=layer if layer >= 0 else layers + 1 + layer,
            act=str(read.config["hidden_act"]),
            projector_act=str(config.get("projector_hidden_act", "gelu")),
            epsilon=float(epsilon),
            keeps_class=config.get("vision_feature_select_strategy") == "full",
            output_size=text.size("hidden_size"),
            image_token=token,
            grids=_grids(read, config, side),
        )
        if read.fine and (shape.hidden_size % shape.heads or shape.image_size % shape.patch_size):
            read.fault("has a vision_config whose heads or patches do not divide its width or image_size.")
        if read.fine and shape.visual_tokens > MOST_TOKENS:
            read.fault(f"gives up to {shape.visual_tokens:,} visual tokens for a picture.", f"At most {MOST_TOKENS:,}.")
        text.refuse()
        read.refuse()
        return shape


def _grids(read: ConfigNumbers, config: Mapping[str, Any], side: int) -> tuple[tuple[int, int], ...]:
    """Return the grids of tiles of a LLaVA 1.6, and note what is wrong with them."""
    if config["architectures"] != [LLAVA_NEXT]:
        return ()
    named = config.get("image_grid_pinpoints")
    start, grids = "has image_grid_pinpoints=", named
    if named is None:
        start, grids = "has no image_grid_pinpoints, so that they are ", GRIDS
    allowed = f"They must be a list of [height, width], multiples of its image_size, {side}."
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, list) and len(grid) == 2 for grid in grids):
        read.fault(f"{start}{shown(grids)}.", allowed)
        return ()
    wrong = [grid for grid in grids if not all(type(each) is int and each > 0 and each % side == 0 for each in grid)]
    for grid in wrong[:1]:
        read.fault(f"{start}{shown(grids)}: {shown(grid)} is not cut into whole tiles.", allowed)
    return () if wrong else tuple((height, width) for height, width in grids)


def _check_kinds(read: ConfigNumbers, config: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    if (kind := vision.get("model_type", "clip_vision_model")) != "clip_vision_model":
        read.fault(f"has an encoder of type {shown(kind)}.", "Built is clip_vision_model.")
    if (picked := config.get("vision_feature_select_strategy", "default")) not in ("default", "full"):
        read.fault(f"has vision_feature_select_strategy={shown(picked)}.", "It must be default or full.")
    if picked == "full" and config["architectures"] == [LLAVA_NEXT]:
        read.fault("has vision_feature_select_strategy='full' with tiles, of which a class token is no part.")
    for name, act in (
        ("hidden_act", read.config["hidden_act"]),
        ("projector_hidden_act", config.get("projector_hidden_act", "gelu")),
    ):
        if act not in ACTIVATIONS:
            read.fault(f"has {name}={shown(act)} in its encoder or projector.", f"Built: {', '.join(ACTIVATIONS)}.")


def image_processor(folder: Path) -> Mapping[str, Any]:
    """Return how a folder prepares pictures; empty where it does not say.

    Raises:
        UserError: a file of it is no JSON object.
    """
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            own = json_object(folder / name)
            processor = own.get("image_processor", own if name.startswith("pre") else None)
            if isinstance(processor, Mapping):
                return processor
    return {}


def check_processor(folder: Path, shape: VisionShape) -> None:
    """Refuse a processor that prepares pictures in another way than `pipelines.checkpoint.pictures.tiles_of`.

    Raises:
        UserError: every such setting of it.
    """
    processor, side = image_processor(folder), shape.image_size
    square = {"height": side, "width": side}
    prepared: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), (True,)),
        "size": ({"shortest_edge": side}, side, *((square,) if shape.grids else ())),
        "crop_size": (square, side),
        "resample": (3,),  # bicubic
        "rescale_factor": (1 / 255,),
    }
    if shape.grids:
        prepared["image_grid_pinpoints"] = ([list(grid) for grid in shape.grids],)
    elif str(processor.get("image_processor_type")).startswith("Llava"):  # CLIP's knows no padding
        prepared["do_pad"] = (False,)
    refuse(
        Fault(
            f"The image processor of {folder} has {key}={shown(processor[key])}, but pictures are prepared with"
            f" {key}={shown(values[0])}.",
            todo="Use a LLaVA with this preprocessing: with any other, its answers would not be the model's.",
        )
        for key, values in prepared.items()
        if processor.get(key) is not None and processor[key] not in values
    )


def vision_name(name: str) -> str | None:
    """Return a tensor's name as `vision_tower...`, `multi_modal_projector...`, `image_newline`; None for another's."""
    own = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    return own if own.startswith(("vision_tower.", "multi_modal_projector.", NEWLINE)) else None
