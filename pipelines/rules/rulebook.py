"""The table of all rules, and functions to apply them."""

from functools import partial

from pipelines.domain.errors import Fault
from pipelines.domain.families import titles
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import LONGROPE, PLAIN_LONGROPE, PLAIN_YARN, ROPE_TYPES, Rotary
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.rules import attention, builder, cpu, edge, gpu, llmapi, lora, speculation, split
from pipelines.rules.record import BUILT, GPU, ON_GPUS, BrokenRule, Cases, DeploymentFacts, Rule, either, judge, known
from pipelines.rules.split import GUIDED, MODEL_CONFIG, MULTIMODAL, REUSE, ROPE, TEMPLATES

# Rotary position embedding: what a TensorRT-LLM checkpoint can express.

TOPIC = "Positions"


def _is_phi(d: DeploymentFacts) -> bool:
    return d.shape is not None and "long_rope" in d.shape.family.features


rotary_rule = partial(Rule, topic=TOPIC, engines=BUILT)
ROTARY_RULES = (
    rotary_rule(
        name="rope-types-are-known",
        when=lambda d: (
            known(d.rotary).kind not in ROPE_TYPES
            and not (known(d.rotary).kind == LONGROPE and _is_phi(d))
            and [{"known": either(ROPE_TYPES)}]
        ),
        failed="{d.label} scales its rotary positions by rope_type '{d.rotary.kind}', which would be computed without"
        " its scaling.",
        allowed="A TensorRT-LLM checkpoint supports {known}.",
        todo="Choose another model, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
    rotary_rule(
        name="scaling-is-plain",
        when=lambda d: (
            bool(known(d.rotary).differences)
            and [
                {
                    "found": either(known(d.rotary).differences, "and"),
                    "plain": PLAIN_YARN if known(d.rotary).kind == "yarn" else PLAIN_LONGROPE,
                }
            ]
        ),
        failed="{d.label} scales its rotary positions by {d.rotary.kind} with {found}, which an engine would compute in"
        " another way than the model.",
        allowed="{plain}",
        todo="Change the block in config.json if the model allows, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
    rotary_rule(
        name="yarn-is-truncated",
        engines=GPU,
        when=lambda d: not known(d.rotary).truncate and (d.shape is None or d.shape.family.trtllm_build),
        failed="{d.label} scales its rotary positions by yarn with truncate=false, but TensorRT-LLM 1.2 rounds the ends"
        " of the ramp.",
        todo="Use engine=openvino or engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
    rotary_rule(
        name="longrope-keeps-to-its-original-context",
        when=lambda d: _is_phi(d) and 0 < known(d.rotary).original < (d.longest or 0),
        failed="{d.label} scales its rotary positions by longrope: sequences of more than {d.rotary.original} tokens"
        " have factors of their own, which are not computed.",
        todo="Set build.max_seq_len={d.rotary.original} or less, or use engine=tensorrt_llm_llmapi.",
        source="tensorrt_llm/models/phi3/config.py: original_max_position_embeddings, two lists of factors",
    ),
    Rule(
        name="queries-do-not-grow",
        topic=TOPIC,
        when=lambda d: d.shape is not None and 0 < known(d.rotary).grows_from < (d.longest or 0),
        failed="{d.label} multiplies queries by a factor that grows from position {d.rotary.grows_from}"
        " (llama_4_scaling_beta), which no engine computes.",
        todo="Set build.max_seq_len={d.rotary.grows_from} or less: up to there the factor is 1.",
        source="tensorrt_llm/_torch/modules/attention.py (1.3.0rc3): only Mistral Large 3's own configuration has it",
    ),
    rotary_rule(
        name="heads-rotate-wholly",
        when=lambda d: known(d.rotary).fraction != 1.0 and not _is_phi(d),
        failed="{d.label} rotates only a part of each head (partial_rotary_factor={d.rotary.fraction:g}), but all of it"
        " would be rotated.",
        allowed="Heads of Phi-3 may be rotated in part.",
        todo="Choose another model, or use engine=tensorrt_llm_llmapi.",
        source=ROPE,
    ),
)

# Parameters of the served model against the engine: batches, beams, ranks, images.

SERVING_TOPIC = "Serving"
IMAGES = "Images"


def _table(d: DeploymentFacts) -> Cases:
    """Compare with `max_multimodal_len`, e.g. 8 x 576 x 1: examples/models/core/multimodal/README.md@89fd9b7."""
    needed = d.build.max_batch_size * known(known(d.images).visual_tokens) * known(d.images).images_per_request
    return ({"needed": needed},) if d.build.max_prompt_embedding_table_size < needed else ()


def _crowded(d: DeploymentFacts) -> Cases:
    nodes = d.triton.num_nodes
    return ({"per_node": d.world_size // nodes},) if d.world_size // nodes > known(d.gpus_per_server) else ()


def _unnamed_ranks(d: DeploymentFacts) -> Cases:
    nodes = d.triton.num_nodes
    others = {
        "a draft model, whose ranks it does not name": d.speculation == "draft_target",
        f"triton.num_nodes={nodes}: several nodes run in leader mode, which names no ranks": nodes > 1,
    }
    return [{"other": other} for other, given in others.items() if given and d.triton.participant_ids is not None]


built_rule = partial(Rule, topic=SERVING_TOPIC, engines=BUILT)
gpu_rule = partial(Rule, topic=SERVING_TOPIC, engines=GPU)
ranks_rule = partial(Rule, topic="Several GPUs", engines=ON_GPUS)
image_rule = partial(Rule, topic=IMAGES, engines=GPU)
image_warning = partial(image_rule, warns=True)
any_image_rule = partial(Rule, topic=IMAGES, engines=BUILT)
SERVING_RULES = (
    built_rule(
        name="batches-fit-the-engine",
        when=lambda d: (d.triton.triton_max_batch_size or 0) > d.build.max_batch_size,
        failed="triton.triton_max_batch_size={d.triton.triton_max_batch_size} is more than the engine's"
        " max_batch_size={d.build.max_batch_size}.",
        todo="Remove it, or raise build.max_batch_size.",
        source=f"{MODEL_CONFIG}; issue #2303",
    ),
    built_rule(
        name="beams-fit-the-engine",
        when=lambda d: (d.triton.max_beam_width or 0) > d.build.max_beam_width,
        failed="triton.max_beam_width={d.triton.max_beam_width} is more than the engine's"
        " max_beam_width={d.build.max_beam_width}.",
        todo="Remove it, or raise build.max_beam_width.",
        source=TEMPLATES,
    ),
    gpu_rule(
        name="tensorrt-engines-guide-with-xgrammar",
        when=lambda d: d.triton.guided_decoding_backend not in (None, "xgrammar"),
        failed="triton.guided_decoding_backend={d.triton.guided_decoding_backend} is not supported by"
        " engine=tensorrt_llm: TensorRT-LLM's C++ backend has xgrammar only.",
        todo="Set guided=xgrammar.",
        source=GUIDED,
    ),
    gpu_rule(
        name="first-beam-alone-is-guided",
        warns=True,
        when=lambda d: d.triton.guided_decoding_backend is not None and d.build.max_beam_width > 1,
        failed="build.max_beam_width={d.build.max_beam_width} with guided decoding: of a request with several beams,"
        " TensorRT-LLM guides the first one alone.",
        todo="Send guided requests with one beam, or set build.max_beam_width=1.",
        source="NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/guidedDecoder.cpp (1.3.0rc3)",
    ),
    built_rule(
        name="bls-answers-one-request-per-instance",
        warns=True,
        when=lambda d: d.through_bls and d.triton.bls_instance_count < d.build.max_batch_size,
        failed="Of requests to tensorrt_llm_bls, triton.bls_instance_count={d.triton.bls_instance_count} are answered"
        " at a time, and the engine takes {d.build.max_batch_size}: the others wait.",
        todo="Raise triton.bls_instance_count to the requests you expect at a time, or send them to ensemble.",
        source=MODEL_CONFIG,
    ),
    ranks_rule(
        name="ranks-divide-into-nodes",
        when=lambda d: d.world_size % d.triton.num_nodes != 0,
        failed="triton.num_nodes={d.triton.num_nodes} does not divide the {d.world_size} ranks of tp_size="
        "{d.build.tp_size} and pp_size={d.build.pp_size}.",
        todo="Change triton.num_nodes, or the ranks.",
        source=MODEL_CONFIG,
    ),
    gpu_rule(
        name="ranks-are-named-for-one-model",
        topic="Several GPUs",
        when=_unnamed_ranks,
        failed="triton.participant_ids cannot be combined with {other}.",
        todo="Set triton.participant_ids=null.",
        source=MODEL_CONFIG,
    ),
    ranks_rule(
        name="ranks-fit-a-server",
        when=_crowded,
        failed="tp_size={d.build.tp_size} and pp_size={d.build.pp_size} on triton.num_nodes={d.triton.num_nodes} need"
        " {per_node} GPUs in one server, which has {d.gpus_per_server}.",
        todo="Raise triton.num_nodes, or lower the ranks.",
        source="data sheets of conf/hardware",
    ),
    any_image_rule(
        name="visual-positions-fit-the-table",
        when=_table,
        failed="build.max_prompt_embedding_table_size={d.build.max_prompt_embedding_table_size} is less than"
        " max_batch_size * visual_tokens * images_per_request = {d.build.max_batch_size} * {d.images.visual_tokens} *"
        " {d.images.images_per_request} = {needed}.",
        todo="Let the group `multimodal` set it, or set {needed}.",
        source=MULTIMODAL,
    ),
    any_image_rule(
        name="images-are-for-llama-here",
        when=lambda d: d.images is not None and "llava" not in known(d.shape).family.features,
        failed=f"multimodal=llava has a {either(titles('llava'))} behind its encoder;"
        " given is {d.shape.architecture}.",
        todo="Use LLaVA's own language model.",
        source=MULTIMODAL,
    ),
    image_warning(
        name="images-are-reused-by-id-only",
        when=lambda d: d.images is not None and d.kv_reuse,
        failed="kv_cache.enable_block_reuse={d.kv_reuse} with images: requests must send prompt_table_extra_id, or"
        " blocks of one image are mistaken for another's.",
        todo="Send it, or set kv_cache.enable_block_reuse=false.",
        source=REUSE,
    ),
    image_rule(
        name="tiles-are-arranged-on-the-cpu",
        when=lambda d: d.images is not None and d.tiled,
        failed="multimodal={d.images.model_type} of a LLaVA 1.6 is not supported by engine=tensorrt_llm: NVIDIA's"
        " Triton models do not arrange its tiles.",
        allowed="They serve LLaVA 1.5.",
        todo="Use engine=openvino, or a LLaVA 1.5.",
        source="triton_backend/all_models/multimodal/multimodal_encoders/1/model.py@5482176",
    ),
    image_rule(
        name="a-request-has-one-image-on-gpus",
        when=lambda d: known(d.images).images_per_request > 1,
        failed="multimodal.images_per_request={d.images.images_per_request} is not supported by engine=tensorrt_llm:"
        " NVIDIA's Triton model multimodal_encoders fails a request with more images than one.",
        todo="Set multimodal.images_per_request=1, or use engine=openvino.",
        source="triton_backend/all_models/multimodal/multimodal_encoders/1/model.py (1.3.0rc3):"
        " postprocess_output_tensors",
    ),
    image_warning(
        name="images-need-nvidias-models",
        when=lambda d: d.images is not None,
        failed="multimodal={d.images.model_type}: the code of multimodal_encoders, preprocessing and"
        " tensorrt_llm_bls for images is NVIDIA's, and deprecated in TensorRT-LLM 1.x. It puts visual tokens before"
        " every text, also one without an image.",
        todo="Copy it in NVIDIA's container, as repository.json describes. To measure texts: multimodal=none.",
        source="triton_backend/all_models/multimodal (1.x release notes)",
    ),
)

RULES: tuple[Rule, ...] = (
    *gpu.RULES,
    *split.RULES,
    *attention.RULES,
    *ROTARY_RULES,
    *builder.RULES,
    *speculation.RULES,
    *lora.RULES,
    *SERVING_RULES,
    *cpu.RULES,
    *llmapi.RULES,
    *edge.RULES,
)


def check(deployment: DeploymentFacts) -> list[BrokenRule]:
    """Return every finding, all at once."""
    return judge(RULES, deployment)


def refused(findings: list[BrokenRule]) -> list[Fault]:
    """Return the findings that stop a run."""
    return [finding.fault for finding in findings if not finding.rule.warns]


def warned(findings: list[BrokenRule]) -> list[Fault]:
    """Return the findings that are reported as warnings."""
    return [finding.fault for finding in findings if finding.rule.warns]


def check_checkpoint(
    shape: ModelShape,
    qformat: QFormat,
    *,
    group_size: int = 128,
    sparsity: str = "none",
    tp_size: int = 1,
    pp_size: int = 1,
    moe_ep_size: int = 1,
    positions: Rotary | None = None,
    needs_gpu: bool | None = None,
    longest: int = 1,
) -> list[Fault]:
    """Return what stops a model from being exported in a format and a split, for callers without a configuration.

    Without `needs_gpu`, by the engine that takes most of its family.
    """
    build = BuildSettings(
        tp_size=tp_size, pp_size=pp_size, moe_ep_size=moe_ep_size, max_input_len=1, max_seq_len=longest
    )
    deployment = DeploymentFacts(
        shape=shape,
        qformat=qformat,
        group_size=group_size,
        sparsity=sparsity,
        build=build,
        rotary=positions,
        # some formats and positions of these families are the CPU engine's alone, and the plan has judged the engine
        needs_gpu=not (shape.family.by_tensor and shape.family.cpu_engine) if needs_gpu is None else needs_gpu,
    )
    return refused(judge((*gpu.RULES, *split.RULES, *ROTARY_RULES), deployment))
