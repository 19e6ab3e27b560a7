"""Post-training quantisation: any float `nn.Module` and some unlabelled batches in, a network that switches widths out.

`quantize(net, loader, method)`: "bs" (bit shifting), "bc" (and calibrated norms), "aciq" (Banner et al., 2019).
No training. Baselines for what any-precision training gains, and of use where no training is possible. Needs torch.
"""

from anyprec.ptq.aciq import AciqSettings, mean_bits
from anyprec.ptq.clipping import best_clip
from anyprec.ptq.methods import METHODS, quantize

__all__ = ["METHODS", "AciqSettings", "best_clip", "mean_bits", "quantize"]
