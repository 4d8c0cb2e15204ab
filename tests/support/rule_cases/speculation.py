"""Cases of the rules about speculative decoding."""

from dataclasses import replace

from pipelines.domain.formats import KvFormat, QFormat
from tests.support.rule_cases.words import EAGLE, FP8, GEMMA, LLAMA, LOOKAHEAD, SMALL_LLAMA, Case

CASES = {
    "drafts-fit-one-iteration": Case(
        {"build": {"speculative_decoding_mode": "medusa", "max_draft_len": 63, "max_batch_size": 129}},
        r"129 \* 63 \+ 129 = 8256.*max_batch_size=128",
        {"build": {"max_batch_size": 128}},
    ),
    "a-mode-needs-a-draft-length": Case(
        {"build": {"speculative_decoding_mode": "draft_tokens_external"}},
        "mode=draft_tokens_external with max_draft_len=0",
        {"build": {"max_draft_len": 4}},
    ),
    "a-draft-length-needs-a-mode": Case(
        {"build": {"max_draft_len": 4}},
        "max_draft_len=4 is set without",
        {"build": {"speculative_decoding_mode": "medusa"}},
    ),
    "server-and-engine-speculate-alike": Case(
        {"triton": {"decoding_mode": "medusa"}},
        "decoding_mode=medusa cannot be combined with .*mode=None.*decoding_mode=null",
        {"build": {"speculative_decoding_mode": "medusa", "max_draft_len": 63}},
    ),
    "speculation-has-no-beams": Case(
        {"speculation": "draft_target", "build": {"max_beam_width": 4}},
        "max_beam_width=4 .*draft_target",
        {"speculation": "none"},
    ),
    "rewound-layers-share-a-window": Case(
        {
            "shape": LLAMA,
            "speculation": "lookahead",
            "build": {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83, "max_seq_len": 4096},
            "triton": {"max_attention_window_size": (2048, 8192)},
        },
        r"max_attention_window_size=\[2048, 8192\] cannot be combined with speculative=lookahead",
        {"build": {"max_seq_len": 2048}},
    ),
    "speculation-has-no-pipeline": Case(
        {"speculation": "lookahead", "build": {"pp_size": 2}}, "pp_size=2 .*lookahead", {"build": {"pp_size": 1}}
    ),
    "drafting-reads-the-kv-cache-again": Case(
        {"speculation": "draft_target"}, "enable_block_reuse is False", {"kv_reuse": True}
    ),
    "draft-and-target-share-a-vocabulary": Case(
        {"same_vocabulary": False, "label": "gemma_2b"},
        "has a different vocabulary from gemma_2b",
        {"same_vocabulary": True},
    ),
    "draft-and-target-have-as-many-tokens": Case(
        {"shape": LLAMA, "draft": GEMMA}, "draft has 256000 tokens, the model has 128256", {"draft": SMALL_LLAMA}
    ),
    "a-draft-reaches-as-far": Case(
        {"shape": LLAMA, "draft": replace(SMALL_LLAMA, max_position_embeddings=8192)},
        "supports 8192 tokens; the model is built for 131072",
        {"build": {"max_seq_len": 8192}},
    ),
    "a-draft-is-smaller": Case(
        {"shape": LLAMA, "draft": LLAMA}, "has 8,030,261,248 parameters", {"draft": SMALL_LLAMA}
    ),
    "two-models-share-the-memory": Case(
        {"speculation": "draft_target"}, r"fraction=0\.9 leaves", {"triton": {"kv_cache_free_gpu_mem_fraction": 0.45}}
    ),
    "heads-are-for-llama": Case(
        {"shape": GEMMA, "speculation": "medusa"},
        "speculative=medusa is prepared only for Llama.*GemmaForCausalLM",
        {"shape": LLAMA},
    ),
    "heads-are-converted-in-16-bit": Case(
        {"speculation": "eagle", "qformat": FP8},
        "speculative=eagle is converted .*quant=fp8",
        {"qformat": QFormat.NONE},
    ),
    "heads-are-converted-with-a-16-bit-cache": Case(
        {"speculation": "medusa", "kv_format": KvFormat.FP8},
        "speculative=medusa .*kv_cache=fp8",
        {"kv_format": KvFormat.AUTO},
    ),
    "heads-answer-greedily": Case(
        {"speculation": "eagle"}, "speculative=eagle accepts tokens greedily", {"speculation": "redrafter"}
    ),
    "pickled-heads-can-run-code": Case(
        {"pickled_heads": ("heads.pt",)}, r"pickled weights \(heads\.pt\)", {"pickled_heads": ()}
    ),
    "trees-fit-the-draft-tokens": Case(
        {"build": {"speculative_decoding_mode": "medusa", "max_draft_len": 62, "max_batch_size": 64}},
        r"triton\.medusa_choices has 63 nodes, more than build\.max_draft_len=62",
        {"build": {"max_draft_len": 63}},
    ),
    "trees-are-as-deep-as-the-draft": Case(
        {"build": EAGLE, "draft_depth": 3},
        r"eagle_choices is 4 tokens deep; speculative\.num_layers is 3",
        {"draft_depth": 4},
    ),
    "trees-have-whole-branches": Case(
        {"build": EAGLE, "triton": {"eagle_choices": "{0}, {1, 0}"}},
        r"eagle_choices has the node \(1, 0\) without its parent \(1\)",
        {"triton": {"eagle_choices": "{1}, {1, 0}"}},
    ),
    "lookahead-is-not-for-every-family": Case(
        {"shape": GEMMA, "build": {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83}},
        "speculative=lookahead does not build with GemmaForCausalLM.*supports Llama",
        {"shape": LLAMA},
    ),
    "eagle-bounds": Case(
        {"build": {**EAGLE, "max_batch_size": 513}},
        "at most 512 .*max_batch_size=513",
        {"build": {"max_batch_size": 512}},
    ),
    "eagle-needs-paged-context": Case(
        {"build": {**EAGLE, "use_paged_context_fmha": "disable"}},
        "EAGLE needs paged .*use_paged_context_fmha=disable",
        {"build": {"use_paged_context_fmha": "enable"}},
    ),
    "eagle-takes-whole-prompts": Case(
        {"build": EAGLE, "chunked_context": True},
        "enable_chunked_context=True is not supported with EAGLE",
        {"chunked_context": False},
    ),
    "eagle-has-no-cuda-graphs": Case(
        {"build": EAGLE, "triton": {"cuda_graph_mode": True}},
        "cuda_graph_mode=True is not",
        {"triton": {"cuda_graph_mode": False}},
    ),
    "lookahead-sizes-give-the-draft-length": Case(
        {"build": {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 84}, "triton": LOOKAHEAD},
        r"max_draft_len=84 .*\(7, 7, 7\).*83",
        {"build": {"max_draft_len": 83}},
    ),
}
