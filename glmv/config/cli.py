"""`glmv config-reference`."""


def config_reference_command() -> None:
    """Print every key of a training config: type, default, meaning, and what `glmv train` does with it (Markdown)."""
    from glmv.config.reference import reference

    print(reference())
