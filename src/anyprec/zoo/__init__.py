"""The paper's networks as any-precision models, and weights from elsewhere. Needs torch.

`build(name, ...)` makes a network, ZOO lists them; `load_float` takes float weights, `from_reference` takes
checkpoints of the paper's released code, `widen` a trained narrower network.
"""

from anyprec.zoo.deeplab import load_backbone
from anyprec.zoo.reference import from_reference
from anyprec.zoo.registry import ZOO, build
from anyprec.zoo.weights import load_float
from anyprec.zoo.widen import widen, widening_factor

__all__ = ["ZOO", "build", "from_reference", "load_backbone", "load_float", "widen", "widening_factor"]
