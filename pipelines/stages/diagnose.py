"""Diagnose: the stages of a deployment in, the first that answers wrongly out."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eval.config import EvalSettings
from eval.diagnose.result import Place
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options
from pipelines.serving.config import ServingSettings
from pipelines.stages.benchmark import logged_server
from pipelines.stages.config import DiagnoseSettings
from pipelines.stages.quantize import Quantize

if TYPE_CHECKING:
    from eval.diagnose.servers import Servers


ITEMS = {"seed": 1, "new_tokens": 24}
"""Which prompts are drawn, and the tokens of each answer."""


@dataclass(frozen=True)
class Diagnose:
    """Model, calibration text, checkpoint, engine and repository in, as far as they exist; `diagnosis.json` out.

    What runs on a server is not known from its files alone, so a diagnosis is made anew every time.

    Attributes:
        asked: what is left out.
        quantize: what the checkpoint was made with; None if it was given.
        rounded: whether weights are rounded to the nearest code, which a checkpoint of `int4_rtn` does not say.
        eval: where a server runs already, OpenAI-compatible or grpc:// of Triton, if there is one.
        options: the engine's own settings; None where it has none.
        logs: folder for the server's log.
        runs_here: whether the engine gives logits, and so can be compared here.
        libraries: whose versions are recorded.
    """

    asked: DiagnoseSettings
    quantize: Quantize | None
    rounded: bool
    eval: EvalSettings
    serving: ServingSettings
    engine: str
    options: EngineOptions | None
    model: str
    variant: str
    logs: Path
    runs_here: bool
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    name = "diagnose"
    version = "1"
    measures = True
    writes = "diagnosis"

    def identity(self) -> dict[str, Any]:
        """Return what is asked, and of whom."""
        return {
            **ITEMS,
            **self.asked.model_dump(include={"serve", "simulate"}),
            "engine": self.engine,
            "options": all_options(self.options),
            "url": self.eval.url,
            "served_model": self.eval.model,
            "model": self.model,
            "variant": self.variant,
        }

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"accused: {facts['accused']}" if facts["accused"] else "no stage is accused"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Compare every stage with the one before it."""
        from eval.diagnose.run import DiagnosedFolders, Simulation, diagnose

        source, simulation = inputs.get("compressed", inputs["model"]), None
        if self.quantize is not None and not self._why_not_simulated:
            simulation = Simulation(self.quantize.spec, partial(self.quantize.simulate, inputs, source, progress))
        served = self.eval.url is not None or ("repository" in inputs and self.asked.serve)
        deployment = DiagnosedFolders(
            model=inputs["model"],
            source=source,
            texts=inputs["text.bundled"],
            simulation=simulation,
            rounded=self.rounded,
            checkpoint=inputs.get("checkpoint"),
            engine=inputs.get("engine"),
            engine_name=self.engine,
            options=all_options(self.options),
            serve=(lambda stack: self._serve(stack, inputs, progress)) if served else None,
            not_run=self._not_run(inputs, served=served),
            template=self.serving.chat_template,
        )
        result = diagnose(
            deployment,
            model=self.model,
            variant=self.variant,
            **ITEMS,
            progress=progress,
        )
        result.save(out_dir / result.FILE)
        accused = result.accused
        return {"accused": str(accused.stage) if accused else None, "sentence": result.sentence()}

    def _not_run(self, inputs: Mapping[str, Path], *, served: bool) -> dict[str, str]:
        reasons = {Place.GPU_ENGINE: "its logits are not read by this project; diagnose the same checkpoint on the CPU"}
        if self._why_not_simulated:
            reasons[Place.MODELOPT] = self._why_not_simulated
        for place, name in ((Place.CHECKPOINT, "checkpoint"), (Place.CPU_ENGINE, "engine")):
            if name not in inputs:
                reasons[place] = f"no {name} was given"
        if not self.runs_here:
            reasons[Place.CPU_ENGINE] = f"engine={self.engine} was asked for"
        if not served:
            why = "diagnose.serve=false" if not self.asked.serve else "there is no repository and no eval.url"
            reasons |= {Place.TRITON: why, Place.OPENAI: why}
        elif self.eval.url is not None:
            other = Place.OPENAI if self.eval.asks_triton else Place.TRITON
            reasons[other] = f"eval.url={self.eval.url} is not one"
        return {str(place): why for place, why in reasons.items()}

    @property
    def _why_not_simulated(self) -> str:
        """Why ModelOpt's simulation is no stage of this diagnosis; empty if it is one."""
        if self.quantize is None:
            return "the checkpoint was given, so its calibration is unknown"
        if not self.asked.simulate:
            return "diagnose.simulate=false"
        return self.quantize.why_not_simulated

    def _serve(self, stack: ExitStack, inputs: Mapping[str, Path], progress: Progress) -> "Servers":
        """Return where the given server is, or start Triton and the OpenAI-compatible service on the repository."""
        from eval.diagnose.servers import Servers

        if self.eval.url is not None and self.eval.asks_triton:
            text_model = self.eval.model or "ensemble"
            return Servers(urlsplit(self.eval.url).netloc, None, text_model=text_model)
        if self.eval.url is not None:
            return Servers(None, self.eval.url, self.eval.model or "")
        from pipelines.serving.frontend import OpenAiFrontend

        settings = self.serving.model_copy(update={"openai": True, "api_key": False})
        server = stack.enter_context(logged_server(inputs["repository"], settings, self.logs, progress))
        stack.enter_context(OpenAiFrontend(server))
        return Servers(server.grpc_url, server.openai_url, server.repository.label)
