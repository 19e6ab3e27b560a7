"""Names that recipes, commands and functions accept, each listed once, without torch.

A recipe is checked against them where torch may not be installed; nn/quantizers.py, training/joint.py and
training/optimizers.py turn them into objects.
"""

from __future__ import annotations

# Name -> its class in nn/quantizers.py.
QUANTIZERS = {"nested": "Nested", "dorefa": "DoReFa", "lsq": "Lsq"}

# Name -> where the scale between a layer's codes and its weights comes from.
SCALES = {"mean": "mean|w|, as in the paper", "learned": "a parameter per layer and width"}

# Name -> what the widths below the widest learn from; the widest always learns from the labels.
LOSSES = {
    "hard": "the labels",
    "soft": "the output of the widest",
    "recursive": "the output of the next wider width",
    "recursive+label": "that and the labels",
    "wider": "the mean output of all wider widths",
    "wider+label": "that and the labels",
}

# Name -> its class in torch.optim.
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
