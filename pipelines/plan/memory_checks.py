"""Check whether an engine fits its GPU, and what is left for requests, with the memory model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from eval.spec import PICTURES
from pipelines.document.show import count
from pipelines.domain.errors import Fault
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import show_bytes
from pipelines.engines.config import HardwareSettings
from pipelines.engines.openvino.memory import (
    CpuMemory,
    CpuSizes,
    adapter_memory,
    blocks_of,
    cpu_memory,
    groups_experts,
    in_same_process,
    inference_precision,
    kv_blocks,
    loaded_for_logits,
    usual_kv_precision,
    vision_memory,
)
from pipelines.host.machine import has_avx512, native_bf16
from pipelines.loadgen.config import DEFAULT_CONCURRENCY
from pipelines.plan.deployment import Deployment
from pipelines.plan.other_memory import DRAFT, ColocatedEngine
from pipelines.plan.targets import EVALUATED, SERVED, STARTED, Target
from pipelines.predict.performance.gpus import usable_bytes
from pipelines.predict.performance.limits import (
    BATCHES,
    LEAST_TOKENS,
    engine_sizes,
    known_lengths,
    request_tokens,
    stepped,
)
from pipelines.predict.performance.memory import DeviceMemory, EngineSizes, concurrency, device_memory, what_fits
from pipelines.serving.memory import evaluation_memory, front_memory, triton_memory
from pipelines.settings.root import Settings

ENGINE = "CPU engine at full load"
FEW_REQUESTS = 4
"""Requests at a time below which batching hardly helps."""
LONG, MUCH_LONGER = 32_768, 8
"""A max_seq_len from which a warning is due, if it is also so many times as long as the longest request."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Result of the memory model."""

    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


def check(
    settings: Settings,
    shape: ModelShape,
    hardware: HardwareSettings,
    formats: list[QFormat],
    beside: Sequence[ColocatedEngine] = (),
    allowed: Callable[[str], bool] = lambda _change: True,
    chosen: Collection[str] = (),
) -> MemoryFit:
    """Check an engine against one GPU, which other engines may share.

    Args:
        settings: the configuration.
        shape: of the model.
        hardware: the GPU, with its memory.
        formats: weight formats it can run.
        beside: the other engines.
        allowed: whether no rule refuses the configuration with a change, given as overrides.
        chosen: limits that were chosen for the load, by name; nothing is advised against them.
    """
    whole, name = usable_bytes(hardware), gpu_name(hardware)
    total = whole - sum(other.least for other in beside)
    usual = whole - sum(other.usual for other in beside)
    sizes = engine_sizes(settings, shape)
    if sizes.shape.num_attention_heads % sizes.tp_size:
        return MemoryFit()  # no such split exists; another rule refuses it
    memory, tokens = device_memory(sizes, usual), request_tokens(settings) or sizes.max_seq_len
    # another format may not choose the same KV cache
    changed = replace(sizes, kv_format=settings.kv_cache.as_given().dtype)
    # memory of runtime and decoder differs between versions, so they alone only cause a warning
    certain = device_memory(replace(sizes, max_batch_size=1), total)
    if concurrency(sizes, certain, tokens).requests < 1:
        fixes = [*filter(allowed, what_fits(changed, total, tokens, formats))]
        todo = f"Fits with {' or '.join(fixes)}." if fixes else _without(beside)
        return MemoryFit(faults=(Fault(_no_room(settings, memory, whole, name, beside), todo=todo),))
    if concurrency(sizes, memory, tokens).requests < 1:
        fixes = [*filter(allowed, what_fits(changed, usual, tokens, formats))]
        return MemoryFit(warnings=(_buffers(settings, memory, whole, name, fixes, beside),))
    warnings = _few_requests(sizes, changed, memory, tokens, formats, allowed, beside)
    if "max_batch_size" not in chosen:
        warnings += _large_buffers(sizes, memory, name)
    if "max_seq_len" not in chosen:
        warnings += _long_sequence(settings, sizes)
    return MemoryFit(
        warnings=warnings, notes=(_parts(sizes, memory, whole, name, beside), _left(sizes, memory, tokens))
    )


def _few_requests(
    sizes: EngineSizes,
    changed: EngineSizes,
    memory: DeviceMemory,
    tokens: int,
    formats: list[QFormat],
    allowed: Callable[[str], bool],
    beside: Sequence[ColocatedEngine],
) -> tuple[Fault, ...]:
    """Warn of a KV cache that hardly holds a batch; `changed` is what proposals start from."""
    requests = int(memory.kv_pool / sizes.kv_request_bytes(tokens)) * sizes.pools
    if requests >= FEW_REQUESTS:
        return ()
    roomy = replace(changed, max_batch_size=max(FEW_REQUESTS, sizes.max_batch_size))
    fixes = [*filter(allowed, what_fits(roomy, memory.total, tokens, formats, least=FEW_REQUESTS))]
    how = f"{FEW_REQUESTS} or more fit with {' or '.join(fixes)}." if fixes else _without(beside)
    return (
        Fault(
            f"The KV cache holds only {count(requests, 'request')} of {tokens:,} tokens at a time (modelled).", todo=how
        ),
    )


def _large_buffers(sizes: EngineSizes, memory: DeviceMemory, name: str) -> tuple[Fault, ...]:
    """Warn of a max_batch_size whose buffers take more than the model itself."""
    weights = memory.weights + memory.streamed
    if memory.buffers <= weights:
        return ()
    smaller = [batch for batch in BATCHES if batch < sizes.max_batch_size * weights / memory.buffers]
    how = f"Set build.max_batch_size={smaller[-1]} or less. " if smaller else ""
    return (
        Fault(
            f"On {name}, runtime and decoder take {show_bytes(memory.buffers)} for build.max_batch_size="
            f"{sizes.max_batch_size}, more than the weights, {show_bytes(weights)} (modelled); the KV cache "
            "gets only what they leave.",
            todo=f"{how}Without build.max_batch_size it is chosen for the load, where the speed of the GPU is known.",
        ),
    )


def _long_sequence(settings: Settings, sizes: EngineSizes) -> tuple[Fault, ...]:
    """Warn of a max_seq_len that is far above what the load needs."""
    load, longest = known_lengths(settings), sizes.max_seq_len
    if load is None or longest < LONG or longest < MUCH_LONGER * load.longest:
        return ()
    enough = max(LEAST_TOKENS, stepped(load.longest))
    return (
        Fault(
            f"The engine is built for build.max_seq_len={longest}, and the longest request of workload="
            f"{settings.workload.name} has {load.longest:,} tokens: runtime and decoder reserve room for the longest "
            "sequence in each of max_batch_size requests.",
            todo=f"Set build.max_seq_len={enough}, if no other load needs more.",
        ),
    )


def gpu_name(hardware: HardwareSettings) -> str:
    """Return the name of a GPU in messages."""
    return str(hardware.gpu if hardware.name == "auto" else hardware.name)


def _without(beside: Sequence[ColocatedEngine]) -> str:
    """Return the advice when no setting of the engine alone helps."""
    if any(other.what == DRAFT for other in beside):
        return "Choose a smaller draft model, or give it GPUs of its own with triton.draft_gpu_device_ids."
    return "Use a larger GPU, or more GPUs."


def _has(whole: float, beside: Sequence[ColocatedEngine]) -> str:
    others = "".join(f", of which {other.what} takes {show_bytes(other.least)}" for other in beside)
    return show_bytes(whole) + others


def gpu_predicted(settings: Settings, shape: ModelShape | None) -> dict[str, float]:
    """Predict the memory of the fullest rank in bytes, as the build log reports it; empty if the shape is unknown."""
    if shape is None:
        return {}
    memory = device_memory(engine_sizes(settings, shape), 0)  # also the weights that are streamed
    return {"weights": memory.weights + memory.streamed, "activations": memory.activations}


def _no_room(
    settings: Settings, memory: DeviceMemory, whole: float, name: str, beside: Sequence[ColocatedEngine]
) -> str:
    what = f"{settings.model.label} in {settings.quant.qformat}"
    if memory.weights > memory.total:
        return (
            f"{what} needs {show_bytes(memory.weights)} of weights per GPU; "
            f"one {name} has {_has(whole, beside)} (modelled)."
        )
    return (
        f"{what} leaves no KV cache for one request on {name} of {_has(whole, beside)}: weights "
        f"{show_bytes(memory.weights)}, activations {show_bytes(memory.activations)} for build.max_num_tokens="
        f"{settings.build.max_num_tokens}, CUDA {show_bytes(memory.cuda)} (modelled)."
    )


def _buffers(
    settings: Settings,
    memory: DeviceMemory,
    whole: float,
    name: str,
    fixes: list[str],
    beside: Sequence[ColocatedEngine],
) -> Fault:
    return Fault(
        f"{settings.model.label} in {settings.quant.qformat} may not load on {name} of {_has(whole, beside)}: "
        f"runtime and decoder take about {show_bytes(memory.buffers)} for build.max_batch_size="
        f"{settings.build.max_batch_size} (modelled on logs of TensorRT-LLM 0.12 and 0.14), "
        f"weights {show_bytes(memory.weights)}, activations {show_bytes(memory.activations)}.",
        todo=f"Fits with {' or '.join(fixes)}." if fixes else _without(beside),
    )


def _parts(sizes: EngineSizes, memory: DeviceMemory, whole: float, name: str, beside: Sequence[ColocatedEngine]) -> str:
    each = " per GPU" if sizes.tp_size * sizes.pp_size > 1 else ""
    parts = (
        ("weights", memory.weights),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
        ("CUDA", memory.cuda),
        *((other.what, other.usual) for other in beside),
        ("KV cache", memory.kv_pool),
    )
    listed = ", ".join(f"{word} {show_bytes(size)}" for word, size in parts)
    text = f"on {name}: {listed} of {show_bytes(whole)}{each}"
    if memory.streamed:
        text += f"; {show_bytes(memory.streamed)} of weights stay on the host and are streamed in every iteration"
    return f"{text} (modelled)"


def _left(sizes: EngineSizes, memory: DeviceMemory, tokens: int) -> str:
    usual, longest = concurrency(sizes, memory, tokens), concurrency(sizes, memory, sizes.max_seq_len)
    held = memory.kv_tokens * sizes.pools
    text = f"KV cache: {held:,} tokens; {count(usual.requests, 'request')} of {count(tokens, 'token')}"
    text += f" at a time ({usual.binds} binds)"
    if longest.requests < 1:
        return f"{text}, not one of max_seq_len={sizes.max_seq_len:,} (modelled)"
    return f"{text}, {longest.requests:,} of max_seq_len={sizes.max_seq_len:,} (modelled)"


def cpu_sizes(settings: Settings, shape: ModelShape) -> CpuSizes:
    """Return the sizes of the CPU engine, without a draft model and adapters."""
    options, build, bound = settings.engine.openvino, settings.build, settings.triton.max_tokens_in_paged_kv_cache
    kv_usual = usual_kv_precision(options) if settings.kv_cache.dtype is KvFormat.AUTO else "u8"
    sizes = CpuSizes(
        shape=shape,
        qformat=settings.quant.qformat,
        precision=inference_precision(options),
        kv_precision=kv_usual if options.kv_cache_precision == "auto" else options.kv_cache_precision,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len or shape.max_position_embeddings,
        kv_cache_bytes=options.kv_cache_bytes,
        candidates=settings.quant.mixed,
        avx512=has_avx512(),
        bf16=native_bf16(),
        table_rows=build.max_prompt_embedding_table_size,
        int8_head=options.head_precision == "int8",
        grouped_experts=groups_experts(options, shape, settings.quant.qformat),
    )
    if bound is None:
        return sizes
    usual = kv_blocks(sizes.block_bytes, sizes.max_seq_len, options.kv_cache_bytes)
    blocks = min(blocks_of(bound), usual)
    return replace(sizes, kv_cache_bytes=blocks * sizes.block_bytes)


def cpu_predicted(settings: Settings, shape: ModelShape | None) -> CpuMemory | None:
    """Predict the memory of the CPU engine's process at full load; None where it is not modelled.

    A draft model and adapters are not counted.
    """
    return cpu_memory(cpu_sizes(settings, shape)) if shape is not None else None


def cpu_needs(d: Deployment) -> dict[str, CpuMemory]:
    """Predict the memory of all that the target runs at a time on the CPU, by the words that the plan has for it.

    The engine is absent where its memory is not modelled, with all that it loads. Evaluating loads the encoder into the
    engine's process, and neither a draft model nor adapters.
    """
    engine = cpu_predicted(d.settings, d.shape)
    needs = {} if engine is None else {ENGINE: engine}
    encoder, served = d.encoder, d.target in SERVED
    if engine is not None and d.shape is not None:
        needs |= _in_its_process(d, d.shape, engine) if served else {}
        sizes = _beside_its_process(d.settings, d.target, d.shape.vocab_size)
        needs |= {name: CpuMemory(size, *(0,) * 6) for name, size in sizes.items()}
    if encoder is not None and (served or (d.target in EVALUATED and d.settings.eval.task == PICTURES)):
        memory = vision_memory(encoder, inference_precision(d.settings.engine.openvino))
        inside = {"vision encoder": replace(memory, process=0, mapped=encoder.weight_bytes)}
        needs |= {"vision encoder, a process of its own": memory} if served else inside
    return needs


def _in_its_process(d: Deployment, shape: ModelShape, engine: CpuMemory) -> dict[str, CpuMemory]:
    """Return what the engine's process loads besides the model: a draft model, and the model with each adapter.

    A draft model has a KV cache of as many blocks, and each adapter has one of the same size.
    """
    sizes, memories = cpu_sizes(d.settings, shape), dict[str, CpuMemory | None]()
    if d.draft is not None and d.draft.shape is not None:
        own = cpu_sizes(d.draft.settings, d.draft.shape)
        pool = engine.kv_blocks * own.block_bytes
        memory = cpu_memory(replace(own, max_num_tokens=sizes.max_num_tokens, kv_cache_bytes=pool))
        memories["draft model"] = memory and in_same_process(memory)
    for task, adapter in sorted(d.inputs.adapters.items()):
        memories[f"LoRA adapter {task}, with the model once more"] = adapter_memory(sizes, adapter.wide_bytes)
    return {name: memory for name, memory in memories.items() if memory is not None}


def _beside_its_process(settings: Settings, target: Target, vocabulary: int) -> dict[str, float]:
    """Return the bytes of what a target runs besides the engine; `all` evaluates in the process that then serves."""
    needs, triton = dict[str, float](), settings.triton
    if target in EVALUATED:
        needs["lm-eval"] = evaluation_memory(vocabulary)
    if target in STARTED:
        needs["tritonserver and this command"] = triton_memory(
            vocabulary,
            tokenizing=triton.preprocessing_instance_count + triton.postprocessing_instance_count,
            others=triton.bls_instance_count,
            benchmarks=target != "serve",
        )
    if target in STARTED and settings.serving.front:
        needs["OpenAI service"] = front_memory(vocabulary)
    return needs


def logits_note(d: Deployment) -> str:
    """Say what requests that need logits take of memory, which is not counted: a server may never get one."""
    size = loaded_for_logits(cpu_sizes(d.settings, d.shape)) if d.shape is not None and d.target in SERVED else None
    if size is None:
        return ""
    return f"the first request that needs logits (guides, seeds, bias) loads {show_bytes(size)} more (modelled)"


def check_cpu(settings: Settings, needs: Mapping[str, CpuMemory], memory_bytes: float) -> MemoryFit:
    """Check what runs at a time against the memory of this machine, on which the CPU engine evaluates and serves.

    Weights and KV pool are refused if they do not fit; iterations may stay smaller than the limits allow, so they only
    cause a warning.
    """
    memory = needs.get(ENGINE)
    own = sum(each.own for each in needs.values())
    if memory is None or own <= memory_bytes:
        return MemoryFit()
    what = f"{settings.model.label} in {settings.quant.qformat} with engine=openvino"
    has = f"this machine has {show_bytes(memory_bytes)} (modelled)."
    parts = f"weights {show_bytes(memory.weights)}, KV cache {show_bytes(memory.kv_pool)}"
    fixed = sum(each.process + each.weights for each in needs.values())
    pools = sum(each.kv_pool for each in needs.values())
    for name, other in needs.items():
        if other is not memory:
            parts += f", {name} {show_bytes(other.own)}"
            fixed += 0 if other.kv_pool else other.activations  # of one picture, which any request needs
    if fixed + pools <= memory_bytes:
        return MemoryFit(
            warnings=(
                Fault(
                    f"{what} may take {show_bytes(own)} at full load; {has}",
                    f"It is {parts}, activations {show_bytes(memory.activations)} for build.max_num_tokens="
                    f"{settings.build.max_num_tokens}.",
                    "Lower build.max_num_tokens or build.max_seq_len.",
                ),
            )
        )
    todo = "Use a smaller model, or a machine with more memory."
    if memory_bytes > fixed:
        key = "triton.max_tokens_in_paged_kv_cache, " if settings.triton.max_tokens_in_paged_kv_cache else ""
        most = int((memory_bytes - fixed) * memory.kv_pool / pools)
        todo = f"Lower {key}engine.openvino.kv_cache_bytes (less than {most}) or build.max_seq_len."
    fault = Fault(f"{what} needs {show_bytes(fixed + pools)}; {has}", f"It is {parts}.", todo)
    return MemoryFit(faults=(fault,))


def two_models(d: Deployment) -> str:
    """Explain why the models that fidelity loads at a time do not fit; empty if they do.

    These are the 16-bit model and the compressed one; then, for the noise, the 16-bit model and a head, in float32 at
    most; and with fidelity.by_layer the 16-bit model twice.
    """
    settings, shape, memory_bytes = d.settings, d.shape, d.machine.memory_bytes
    reference = cpu_predicted(d.baseline.settings, d.unpruned)
    if shape is None or reference is None:
        return ""
    other = cpu_predicted(settings, shape) or reference
    again = reference.weights if settings.fidelity.by_layer else 4.0 * shape.unpruned.head_params
    needed = reference.process + reference.weights + max(other.weights, again)
    if needed <= memory_bytes:
        return ""
    return (
        f"fidelity loads the 16-bit {settings.model.label} and a second model, which takes about {show_bytes(needed)} "
        f"(modelled); this machine has {show_bytes(memory_bytes)}."
    )


def cpu_reached(settings: Settings, shape: ModelShape | None) -> CpuMemory | None:
    """Predict the memory that the benchmark can make the CPU engine's process use; None where it is not modelled.

    This is the memory at full load except for the size of iterations: in a closed loop, none is larger than all users'
    prompts together. With prompts of one length an iteration is k prompts and d tokens of other users, k + d <= users.
    """
    if shape is None or settings.speculative.mode == "draft_target" or settings.lora.adapters:
        return None  # adapters have what a request for them reaches, and the benchmark sends none
    sizes, workload = cpu_sizes(settings, shape), settings.workload
    isl, osl = workload.longest("isl"), workload.longest("osl")
    if workload.arrival != "closed" or isl is None or osl is None:
        return cpu_memory(sizes)
    users = min(max(settings.benchmark.concurrency or DEFAULT_CONCURRENCY), settings.build.max_batch_size)
    prompt = workload.turns * (isl + osl) - osl
    one_length = workload.turns == 1 and workload.isl.distribution == "fixed" and not workload.mix
    return cpu_memory(
        replace(
            sizes,
            max_num_tokens=min(sizes.max_num_tokens, users * prompt),
            iterations=users * (users + 3) // 2 if one_length else None,
        )
    )


def cpu_notes(needs: Mapping[str, CpuMemory], tokens: int | None) -> tuple[str, ...]:
    """Describe what will be needed at a time (see `cpu_needs`), and held of requests of so many tokens."""
    notes = [f"{name}: {_listed(memory)}" for name, memory in needs.items()]
    if (engine := needs.get(ENGINE)) is not None:
        requests = ""
        if tokens is not None:
            together = engine.kv_blocks // blocks_of(tokens)
            requests = f", {count(together, 'request')} of {count(tokens, 'token')} at a time"
        blocks = f"KV cache: {count(engine.kv_blocks, 'block')}, {engine.kv_tokens:,} tokens{requests} (modelled)"
        notes.insert(1, blocks)
    return tuple(notes)


def _listed(memory: CpuMemory) -> str:
    parts = (
        ("process", memory.process),
        ("weights", memory.weights),
        ("activations", memory.activations),
        ("compiled kernels", memory.kernels),
        ("KV cache", memory.kv_pool),
        ("mapped files", memory.mapped),
    )
    listed = ", ".join(f"{word} {show_bytes(size)}" for word, size in parts if size)
    return f"{show_bytes(memory.total)} ({listed}; modelled)"
