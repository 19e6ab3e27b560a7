"""Post-training quantization: any float `nn.Module` and some unlabeled batches in, a network that switches widths out.

`anyprec.ptq(net, loader, method)`: "bs" (bit shifting), "bc" (and calibrated norms), "aciq" (Banner et al., 2019),
"gptq" (nested codes chosen for all widths at once). `anyprec.quantize(net, images, path)` also packs the result.
No training. Baselines for what any-precision training gains, and of use where no training is possible. Needs torch.
"""

from anyprec.post_training.aciq import AciqSettings, mean_bits
from anyprec.post_training.clipping import best_clip
from anyprec.post_training.gptq import GptqSettings
from anyprec.post_training.methods import METHODS, ptq

__all__ = ["METHODS", "AciqSettings", "GptqSettings", "best_clip", "mean_bits", "ptq"]
