"""Data sets, augmentation and batches, with only numpy; Pillow (image files) and scipy (SVHN) when needed.

```
data = load_data("cifar10", "train", root)
for images, labels in batches(data, 128, augment="crop-flip", train=True, seed=0, epoch=3): ...
```
"""

from anyprec.data.augment import AUGMENTS, Augment
from anyprec.data.catalog import DATASETS, DatasetSpec, load_data
from anyprec.data.loader import batches, preprocessing_of, steps_per_epoch
from anyprec.data.masks import IGNORED, VOID, MaskData, MaskSample
from anyprec.data.sets import ArrayData, FileData

__all__ = [
    "AUGMENTS",
    "DATASETS",
    "IGNORED",
    "VOID",
    "ArrayData",
    "Augment",
    "DatasetSpec",
    "FileData",
    "MaskData",
    "MaskSample",
    "batches",
    "load_data",
    "preprocessing_of",
    "steps_per_epoch",
]
