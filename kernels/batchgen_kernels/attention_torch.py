from batchgen_kernels.attention_reference import plan_attention_reference as plan_attention_torch  # noqa: F401
