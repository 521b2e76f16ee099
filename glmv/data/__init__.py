"""Samples: from data files and pictures to batches."""

from glmv.data.batch import Batch, collate, pack
from glmv.data.errors import DataError
from glmv.data.load import Samples, load_samples
from glmv.data.sample import Sample
from glmv.data.sampler import BatchSampler

__all__ = ["Batch", "BatchSampler", "DataError", "Sample", "Samples", "collate", "load_samples", "pack"]
