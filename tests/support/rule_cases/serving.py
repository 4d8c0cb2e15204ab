"""Cases of the rules about the served model."""

from tests.support.rule_cases.words import GEMMA, LLAMA, LLAVA, Case, kv

CASES = {
    "batches-fit-the-engine": Case(
        {"triton": {"triton_max_batch_size": 9}, "build": {"max_batch_size": 8}},
        "batch_size=9 is more than .*=8",
        {"build": {"max_batch_size": 9}},
    ),
    "beams-fit-the-engine": Case(
        {"triton": {"max_beam_width": 4}},
        "max_beam_width=4 is more than .*max_beam_width=1",
        {"build": {"max_beam_width": 4}},
    ),
    "tensorrt-engines-guide-with-xgrammar": Case(
        {"engine": "tensorrt_llm", "triton": {"guided_decoding_backend": "llguidance"}},
        "guided_decoding_backend=llguidance is not supported by engine=tensorrt_llm",
        {"engine": "openvino"},
    ),
    "first-beam-alone-is-guided": Case(
        {"engine": "tensorrt_llm", "triton": {"guided_decoding_backend": "xgrammar"}, "build": {"max_beam_width": 4}},
        "max_beam_width=4 with guided decoding: .* guides the first one alone",
        {"build": {"max_beam_width": 1}},
    ),
    "bls-answers-one-request-per-instance": Case(
        {"through_bls": True, "triton": {"bls_instance_count": 7}, "build": {"max_batch_size": 8}},
        "bls_instance_count=7 are answered at a time, and the engine takes 8",
        {"triton": {"bls_instance_count": 8}},
    ),
    "ranks-divide-into-nodes": Case(
        {"build": {"tp_size": 4}, "triton": {"num_nodes": 3}},
        "num_nodes=3 does not divide the 4 ranks",
        {"triton": {"num_nodes": 2}},
    ),
    "ranks-are-named-for-one-model": Case(
        {"speculation": "draft_target", "triton": {"participant_ids": ((1,),)}},
        "participant_ids cannot be combined with a draft model",
        {"speculation": "none"},
    ),
    "ranks-fit-a-server": Case(
        {"gpus_per_server": 8, "build": {"tp_size": 8, "pp_size": 2}},
        "need 16 GPUs in one server, which has 8",
        {"triton": {"num_nodes": 2}},
    ),
    # 8 requests of 576 positions are 4608
    "visual-positions-fit-the-table": Case(
        {"images": LLAVA, "build": {"max_batch_size": 8, "max_prompt_embedding_table_size": 4607}},
        r"size=4607 is less than .*8 \* 576 \* 1 = 4608",
        {"build": {"max_prompt_embedding_table_size": 4608}},
    ),
    "images-are-for-llama-here": Case(
        {"images": LLAVA, "shape": GEMMA}, "multimodal=llava has a Llama .*GemmaForCausalLM", {"shape": LLAMA}
    ),
    "images-are-reused-by-id-only": Case(kv(images=LLAVA), "enable_block_reuse=True with images", {"kv_reuse": False}),
    "tiles-are-arranged-on-the-cpu": Case(
        {"images": LLAVA, "tiled": True}, "multimodal=llava of a LLaVA 1.6 is not supported", {"tiled": False}
    ),
    "a-request-has-one-image-on-gpus": Case(
        {"images": LLAVA.model_copy(update={"images_per_request": 2})},
        "images_per_request=2 is not supported by engine=tensorrt_llm",
        {"images": LLAVA},
    ),
    "images-need-nvidias-models": Case(
        {"images": LLAVA}, "multimodal=llava: the code of .*deprecated", {"images": None}
    ),
}
