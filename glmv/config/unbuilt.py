"""Options that the schema knows and `glmv train` cannot do yet, or has no use for."""

from typing import Any

from glmv.config.explain import as_yaml
from glmv.config.root import Config

# Option, values that work, what the others would need.
_BUILT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("parallel.tensor_parallel_size", (1,), "tensor parallelism"),
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
    ("features.enable_activation_offload", (False,), "activation offload"),
    ("training.train_epochs", (None,), "counting in epochs"),
    ("training.optimizer", ("adamw",), "this optimizer"),
    ("training.load_format", ("auto", "dcp"), "loading Hugging Face weights directly"),
    ("training.load_rank0_and_broadcast", (False,), "loading by broadcast"),
    ("training.save_format", ("auto", "dcp"), "saving in Hugging Face format"),
    ("training.save_async", (False,), "asynchronous saving"),
    ("tools.profile.enable", (False,), "the profiler"),
    ("tools.memory_profile.enable", (False,), "the memory profiler"),
)

# Keys, or whole sections, that published configs carry and that change nothing here; why.
_IN_MEMORY = "all samples are read into memory before the first step"
_WITHOUT_EFFECT: dict[str, str] = {
    "data.dataset_param.preprocess_parameters.trust_remote_code": "code from a checkpoint is never run",
    "data.dataset_param.preprocess_parameters.video_max_pixels": "video samples are not built yet",
    "data.dataset_param.preprocess_parameters.video_min_pixels": "video samples are not built yet",
    "data.dataset_param.preprocess_parameters.video_fps": "video samples are not built yet",
    "data.dataset_param.preprocess_parameters.video_maxlen": "video samples are not built yet",
    "data.dataset_param.basic_parameters.cache_dir": _IN_MEMORY,
    "data.dataset_param.basic_parameters.overwrite_cache": "no cache is written",
    "data.dataset_param.basic_parameters.preprocessing_batch_size": _IN_MEMORY,
    "data.dataset_param.basic_parameters.preprocessing_num_workers": _IN_MEMORY,
    "data.dataloader_param.num_workers": _IN_MEMORY,
    "data.dataloader_param.enable_preload": _IN_MEMORY,
    "model.trust_remote_code": "code from a checkpoint is never run",
    "features.activation_offload_plan": "activation offload is not built yet",
    "training.init_model_with_meta_device": "the model is always created without memory",
    "training.load_strict": "missing and unexpected keys always stop the run",
    "training.no_load_rng": "there is no random state: sample order follows from seed and step",
    "training.no_save_rng": "there is no random state: sample order follows from seed and step",
    "training.plugin": "what the published plugins register is built in",
    "tools.profile.profile_type": "the profiler is not built yet",
    "tools.profile.ranks": "the profiler is not built yet",
    "tools.profile.static_param": "the profiler is not built yet",
}


def built_values(path: str) -> tuple[Any, ...] | None:
    """The values of `section.key` that `glmv train` can do; None if it can do all."""
    return next((built for name, built, _ in _BUILT if name == path), None)


def without_effect(path: str) -> str | None:
    """Why `section.key` changes nothing; None if it does."""
    return next((why for name, why in _WITHOUT_EFFECT.items() if f"{path}.".startswith(f"{name}.")), None)


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
