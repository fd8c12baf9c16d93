"""Imported by the server from which ranks are forked, where it is installed: what Transformers imports at first use."""

import importlib

for name in (
    "accelerate",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
):
    importlib.import_module(name)
