"""Options that the schema knows and `glmv train` cannot do yet."""

from typing import Any

from glmv.config.explain import as_yaml
from glmv.config.root import Config

# Option, values that work, what the others would need.
_BUILT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("parallel.tensor_parallel_size", (1,), "tensor parallelism"),
    ("parallel.ring_attention_size", (1,), "ring context parallelism"),
    ("parallel.ulysses_parallel_size", (1,), "Ulysses context parallelism"),
    ("parallel.expert_parallel_size", (1,), "expert parallelism"),
    ("parallel.expert_fully_shard_parallel_size", (None,), "a mesh of its own for experts"),
    ("parallel.fsdp_plan.ignored_modules", ([],), "modules outside FSDP"),
    ("parallel.fsdp_plan.hook_modules", (None, []), "hook modules"),
    ("parallel.fsdp_plan.cast_forward_inputs", (True,), "FSDP units without input casts"),
    ("parallel.fsdp_plan.pregather", (False,), "gathering before the step"),
    ("parallel.fsdp_plan.cpu_offload", (False,), "parameters in host memory"),
    ("data.dataset_param.dataset_type", ("huggingface",), "this kind of data set"),
    ("data.dataset_param.attr.videos", (None,), "video samples"),
    ("data.dataset_param.preprocess_parameters.use_fast_tokenizer", (True,), "slow tokenizers"),
    ("data.dataset_param.preprocess_parameters.split_special_tokens", (False,), "special tokens as plain text"),
    ("data.dataset_param.basic_parameters.template", ("glm4v_moe",), "this chat format"),
    ("data.dataloader_param.collate_param.ignore_pad_token_for_loss", (True,), "learning padding tokens"),
    ("model.attn_implementation", ("eager", "sdpa", "flash_attention_2"), "this attention kernel"),
    ("features.enable_chunk_loss", (False,), "the chunked loss"),
    ("features.enable_dynamic_chunk_loss", (False,), "the dynamically chunked loss"),
    ("features.recompute", (False,), "activation recomputation"),
    ("features.enable_activation_offload", (False,), "activation offload"),
    ("features.enable_ep_balance", (False,), "expert load balancing"),
    ("training.train_epochs", (None,), "counting in epochs"),
    ("training.optimizer", ("adamw",), "this optimizer"),
    ("training.load_format", ("auto", "dcp"), "loading Hugging Face weights directly"),
    ("training.load_rank0_and_broadcast", (False,), "loading by broadcast"),
    ("training.save_format", ("auto", "dcp"), "saving in Hugging Face format"),
    ("training.save_async", (False,), "asynchronous saving"),
    ("tools.profile.enable", (False,), "the profiler"),
    ("tools.memory_profile.enable", (False,), "the memory profiler"),
)


def unbuilt(config: Config) -> list[str]:
    """The choices of a config that `glmv train` must refuse, one sentence each, in the order of the sections."""
    return [
        f"{path} = {as_yaml(value)}: {what} is not built yet; use {' or '.join(map(as_yaml, built))}"
        for path, built, what in _BUILT
        if (value := option(config, path)) not in built
    ]


def option(config: Config, path: str) -> object:
    """The value of `section.key`."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
