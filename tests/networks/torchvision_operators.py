"""Makes `import torchvision` work beside a torch whose C++ operators it was not built for: it only wants them declared.

timm, pytorchcv and segmentation_models_pytorch import torchvision; none of the networks here runs its operators.
"""

import importlib.util

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a declaration lives as long as its library


def declare() -> None:
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        _declared.append(library)
