"""lm-eval task files: `lm_eval --include_path eval/tasks --tasks mini_mmlu` works with any lm-eval model."""
