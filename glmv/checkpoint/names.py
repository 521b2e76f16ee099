"""Parameter names as checkpoints know them."""

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """Remove what recomputation and compilation wrappers put into a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
