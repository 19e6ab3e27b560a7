"""The building blocks of an any-precision network: quantizers, layers, norms, switching, conversion. Needs torch.

quantizers.py (the exact arithmetic) -> layers.py, norms.py (modules that act at any width) -> switching.py (which
width) -> convert.py (any `nn.Module` in) -> calibrate.py (widths that were not trained).
"""

from anyprec.nn.attention import AnyMultiheadAttention
from anyprec.nn.layers import (
    AnyActivation,
    AnyConv1d,
    AnyConv2d,
    AnyConv3d,
    AnyConvTranspose1d,
    AnyConvTranspose2d,
    AnyConvTranspose3d,
    AnyLayer,
    AnyLinear,
)
from anyprec.nn.norms import SwitchBatchNorm1d, SwitchBatchNorm2d, SwitchGroupNorm, SwitchLayerNorm, SwitchNorm
from anyprec.nn.quantizers import QUANTIZERS, make_quantizer
from anyprec.nn.split import SplitNetwork

__all__ = [
    "QUANTIZERS",
    "AnyActivation",
    "AnyConv1d",
    "AnyConv2d",
    "AnyConv3d",
    "AnyConvTranspose1d",
    "AnyConvTranspose2d",
    "AnyConvTranspose3d",
    "AnyLayer",
    "AnyLinear",
    "AnyMultiheadAttention",
    "SplitNetwork",
    "SwitchBatchNorm1d",
    "SwitchBatchNorm2d",
    "SwitchGroupNorm",
    "SwitchLayerNorm",
    "SwitchNorm",
    "make_quantizer",
]
