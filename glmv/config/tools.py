"""`tools`: profiling."""

from typing import Literal

from pydantic import Field, model_validator

from glmv.config.section import Section, Step


class StaticProfile(Section):
    """`tools.profile.static_param`: a profile of fixed steps."""

    level: Literal["level_none", "level0", "level1", "level2"] = "level1"
    """How much the profiler collects."""
    with_stack: bool = False
    """Collect call stacks."""
    with_memory: bool = False
    """Collect memory use of operators."""
    record_shapes: bool = False
    """Collect shapes of operator inputs."""
    with_cpu: bool = False
    """Collect CPU events."""
    save_path: str = "./profiling"
    """Directory of the profile."""
    start_step: Step = 10
    """First step of the profile."""
    end_step: Step = 11
    """The step at which the profile ends."""

    @model_validator(mode="after")
    def _ends_after_start(self) -> "StaticProfile":
        if self.end_step <= self.start_step:
            raise ValueError(f"end_step = {self.end_step} must be larger than start_step = {self.start_step}")
        return self


class ProfileConfig(Section):
    """`tools.profile`."""

    enable: bool = False
    """Write a profile."""
    profile_type: Literal["static", "dynamic"] = "static"
    """Fixed steps, or steps asked for while training runs."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks that write a profile; -1 means all."""
    static_param: StaticProfile = StaticProfile()
    """The static profile."""


class MemoryProfileConfig(Section):
    """`tools.memory_profile`."""

    enable: bool = False
    """Write a memory snapshot."""


class ToolsConfig(Section):
    """`tools`."""

    profile: ProfileConfig = ProfileConfig()
    """Time profile."""
    memory_profile: MemoryProfileConfig = MemoryProfileConfig()
    """Memory snapshot."""
