"""The whole training config: six sections, as published configs have them."""

from glmv.config.data import DataConfig
from glmv.config.features import FeaturesConfig
from glmv.config.model import ModelSection
from glmv.config.parallel import ParallelConfig
from glmv.config.section import Section
from glmv.config.tools import ToolsConfig
from glmv.config.training import TrainingConfig


class Config(Section):
    """A training config. It knows nothing of ranks: the same file means the same on every cluster."""

    parallel: ParallelConfig = ParallelConfig()
    """Meshes."""
    data: DataConfig
    """Samples and batches."""
    model: ModelSection
    """Architecture and implementation."""
    features: FeaturesConfig = FeaturesConfig()
    """Loss and memory features."""
    training: TrainingConfig
    """Steps, schedule, optimizer, checkpoints."""
    tools: ToolsConfig = ToolsConfig()
    """Profiling."""
