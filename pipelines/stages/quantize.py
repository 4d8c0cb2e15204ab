"""Quantize: a model in, a checkpoint for trtllm-build or the PyTorch backend out, verified by reading it back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.checkpoint.unified import verify_unified
from pipelines.checkpoint.verify import verify
from pipelines.compress.config import SEED, CalibrationSettings, KvCacheSettings, QuantSettings
from pipelines.compress.specs import Layout, QuantSpec
from pipelines.compress.texts import load_texts, plain_chat
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.formats import FORMATS, QFormat, calibrates, reads_texts
from pipelines.domain.progress import Progress
from pipelines.domain.rotary import Rotary
from pipelines.domain.units import show_bytes
from pipelines.rules.rulebook import check_checkpoint
from pipelines.serving.openai.errors import ApiError

if TYPE_CHECKING:
    from pipelines.compress.simulating import SimulatedModel
    from pipelines.serving.openai.prompts import ChatTemplate


@dataclass(frozen=True)
class Quantize:
    """Hugging Face folder in, a checkpoint for tp_size x pp_size ranks out.

    Attributes:
        calibration: how much text to calibrate on, and how it is split.
        device: where ModelOpt computes, "cpu" or "cuda".
        layout: "tensorrt_llm": `config.json` + `rankN.safetensors`; "hugging_face": ModelOpt's unified checkpoint.
        moe_ep_size: parts of the tensor-parallel ranks between which the experts of a mixture are divided.
        late_window: attention window of a family whose checkpoints did not state theirs before; 0 is none.
        imported: the folder is already quantized, and all it holds is taken over.
        experts: whether the model is a mixture of experts, whose FP8 checkpoints did not name the routers before.
    """

    quant: QuantSettings
    kv_cache: KvCacheSettings
    calibration: CalibrationSettings
    tp_size: int
    pp_size: int
    device: str
    layout: Layout = "tensorrt_llm"
    moe_ep_size: int = 1
    late_window: int = 0
    imported: bool = False
    experts: bool = False
    name = "quantize"
    measures = False
    writes = "checkpoint"

    @property
    def version(self) -> str:
        """That of the code whose bytes these are: GPTQ and AWQ have changed since the other formats did."""
        form = FORMATS[self.quant.qformat]
        return "5" if form.sequential else "3" if form.tuning == "awq" else "2"

    @property
    def by_tensor(self) -> bool:
        """Whether tensors are copied, or rounded by what they are alone, which takes no ModelOpt."""
        return self.layout != "hugging_face" and (self.imported or self.spec.by_tensor)

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose version determines the bytes; none for those that follow from the model's own."""
        return () if self.by_tensor else ("nvidia-modelopt", "torch", "transformers")

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages that must be importable."""
        return ("torch",) if self.by_tensor else ("modelopt", "torch", "transformers")

    @property
    def calibrated(self) -> bool:
        """Whether ModelOpt knows the format, and calibrates it unless `by_tensor`."""
        return calibrates(self.quant.formats, self.kv_cache.dtype)

    @property
    def reads_texts(self) -> bool:
        """Whether calibration texts are read: weights that are rounded by themselves need none."""
        return not self.imported and reads_texts(self.quant.formats, self.kv_cache.dtype)

    @property
    def spec(self) -> QuantSpec:
        """The formats, with the settings that they read."""
        return QuantSpec(self.quant.of(self.quant.qformat), self.kv_cache.dtype)

    @property
    def why_not_simulated(self) -> str:
        """Why ModelOpt does not simulate this format in `make diagnose`; empty if it does."""
        if self.quant.candidates:
            return "a mix of formats is not searched again"
        if not self.calibrated:
            return f"nothing is calibrated for {self.quant.qformat}"
        if FORMATS[self.quant.qformat].activation == "fp4":
            return "ModelOpt simulates FP4 activations on CUDA only"
        if self.device != "cpu":
            return f"the checkpoint was calibrated on {self.device}, and is compared on the CPU"
        return ""

    def simulate(self, inputs: Mapping[str, Path], source: Path, progress: Progress) -> "SimulatedModel":
        """Calibrate again, as `run` does."""
        from pipelines.compress.simulating import SimulatedModel, fake_quantized_model

        texts = texts_of(self.calibration, inputs) if self.reads_texts else ()
        model = fake_quantized_model(source, self.spec, texts, self.calibration, progress)
        return SimulatedModel(model.float())  # calibrated in the type of `run`

    def identity(self) -> dict[str, Any]:
        """Return format, the options that the format reads, ranks, and calibration where it is used."""
        quant = self.quant.of(self.quant.qformat)
        tunings = {FORMATS[each].tuning for each in quant.formats}
        identity: dict[str, Any] = {
            "qformat": quant.qformat.value,
            "kv_cache": self.kv_cache.dtype.value,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
        }
        if not self.by_tensor:
            identity["device"] = self.device  # CPU and GPU round differently
        optional = {
            "dtype": (quant.dtype, "auto"),
            "layout": (self.layout, "tensorrt_llm"),
            "moe_ep_size": (self.moe_ep_size, 1),
            "sliding_window": (self.late_window, 0),
            "routers_in_16_bit": (self.experts and self.layout != "hugging_face" and not self.spec.by_tensor, False),
            "int4_scales": (quant.int4_scales, "max"),
            "fp4_inputs": (quant.fp4_inputs, "max"),
        }
        identity |= {name: value for name, (value, usual) in optional.items() if value != usual}
        if quant.qformat is QFormat.AUTO:
            read = {"effective_bits", "candidates"} if self.imported else set(quant.SEARCH)
            identity["search"] = quant.model_dump(mode="json", include=read)
        if any(FORMATS[each].weights.group for each in quant.formats):
            identity["group_size"] = max(FORMATS[each].weights.group_size(quant.group_size) for each in quant.formats)
        if "smoothquant" in tunings:
            identity["smoothquant_alpha"] = quant.smoothquant_alpha
        if "awq" in tunings:
            identity["awq_alpha_step"] = quant.awq_alpha_step
        if self.reads_texts:
            identity["calibration"] = calibration_identity(self.calibration)
        return identity

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        search = facts.get("search")
        mix = f", {search['effective_bits']:.2f} effective bits" if search else ""
        return f"{show_bytes(facts['source_bytes'])} -> {show_bytes(facts['total_bytes'])}{mix}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Calibrate, export, verify."""
        from pipelines.compress.quantizing import quantize

        for qformat in self.quant.formats:
            check_model(
                inputs["model"],
                qformat,
                group_size=self.quant.group_size,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                moe_ep_size=self.moe_ep_size,
                with_positions=self.layout != "hugging_face",
            )
        facts = quantize(
            inputs["model"],
            out_dir,
            self.spec,
            texts_of(self.calibration, inputs) if "calibration" in inputs else (),
            self.calibration,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            moe_ep_size=self.moe_ep_size,
            device=self.device,
            layout=self.layout,
            progress=progress,
        )
        if faults := (verify_unified if self.layout == "hugging_face" else verify)(out_dir):
            raise RuntimeError("the exported checkpoint breaks its own rules:\n" + "\n".join(map(str, faults)))
        return facts


def check_model(folder: Path, qformat: QFormat, *, with_positions: bool = True, **limits: Any) -> None:
    """Apply the rules that the plan could not apply because the model was not on disk yet.

    Args:
        folder: Hugging Face checkpoint.
        qformat: to export it in.
        with_positions: whether the checkpoint's reader must know the model's rotary embedding.
        limits: as for `check_checkpoint`.

    Raises:
        UserError: the model cannot be exported like that.
    """
    from pipelines.compress.model_folder import look_at

    model = look_at(folder)
    positions = Rotary.of(model.config) if with_positions else None
    refuse(check_checkpoint(model.shape, qformat, positions=positions, **limits))


def calibration_identity(calibration: CalibrationSettings) -> dict[str, Any]:
    """Return the settings that determine which tokens are seen; the text itself is an input with its own digest."""
    batches = calibration.model_dump(include=set(calibration.BATCHING))
    return {**batches, "seed": SEED, **reading_identity(calibration)}


def reading_identity(calibration: CalibrationSettings) -> dict[str, Any]:
    """Return the settings that determine how the text is read."""
    read = calibration.model_dump(include=set(calibration.READ.get(calibration.source, ())) & {"split", "column"})
    if calibration.source == "local" and calibration.path is not None:
        read["file_type"] = calibration.path.suffix  # decides how a file is read, and a file's digest leaves it out
    return read


def texts_of(calibration: CalibrationSettings, inputs: Mapping[str, Path]) -> Iterable[str]:
    """Read calibration texts from the input folder or file, as far as needed."""
    split = calibration.split if calibration.source == "hub" else None
    render = ChatRenderer(inputs["model"])
    return load_texts(inputs["calibration"], split=split, column=calibration.column, render=render)


class ChatRenderer:
    """Makes a text of a chat: in the form of the model's own template, or plain where it has none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _template(self) -> "ChatTemplate | None":
        from pipelines.serving.openai.prompts import ChatTemplate

        templates, tokens = chat_templates(self._folder)
        return ChatTemplate(templates, tokens) if "default" in templates else None

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render one chat.

        Raises:
            UserError: the template refuses it.
        """
        if self._template is None:
            return plain_chat(messages)
        values = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render(messages, values)
        except ApiError as fault:
            raise UserError(
                f"the chat template of '{self._folder}' does not take this chat: {fault}",
                todo="Correct the template or the row, or give text without chats: calibration=local "
                "calibration.path=FILE, fidelity.texts=[prose,code,languages].",
            ) from None
