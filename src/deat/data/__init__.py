"""Data sets, and batches of any data on the device."""

from deat.data.augment import Augment
from deat.data.batch_source import BatchSource, DataLike, as_source
from deat.data.datasets import DatasetInfo, DataSplits, list_dataset_infos, list_datasets, load_data
from deat.data.image_set import ImageSet
from deat.data.in_memory import InMemorySource
from deat.data.streaming import LazyImages, StreamingSource

__all__ = [
    "Augment",
    "BatchSource",
    "DataLike",
    "DataSplits",
    "DatasetInfo",
    "ImageSet",
    "InMemorySource",
    "LazyImages",
    "StreamingSource",
    "as_source",
    "list_dataset_infos",
    "list_datasets",
    "load_data",
]
