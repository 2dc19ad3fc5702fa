"""Data: images and labels from the package, from disk or from memory, as batches on the device."""

from deat.data.augment import Augment
from deat.data.corpus import Corpus, DataInfo, infos, load, names
from deat.data.imageset import ImageSet
from deat.data.resident import Resident
from deat.data.source import Data, Source, as_source
from deat.data.stream import LazyImages, Stream

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
