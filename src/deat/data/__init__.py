"""Data: images and labels from the package, from disk or from memory, as batches on the device."""

from deat.data.augment import Augment
from deat.data.datasets import Corpus, DataInfo, infos, load, names
from deat.data.image_set import ImageSet
from deat.data.resident import Resident
from deat.data.sources import Data, Source, as_source
from deat.data.streaming import LazyImages, Stream

__all__ = [
    "Augment",
    "Corpus",
    "Data",
    "DataInfo",
    "ImageSet",
    "LazyImages",
    "Resident",
    "Source",
    "Stream",
    "as_source",
    "infos",
    "load",
    "names",
]
