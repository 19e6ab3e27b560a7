"""Names a user may choose from, each list written once: for recipes, for the command line and for the modules that do
the work.

No torch here: a recipe is checked, and `anyprec VERB --help` answered, without it. nn/quantizers.py, training/joint.py
and training/optimizers.py turn their names into objects.
"""

from __future__ import annotations

LAYOUTS = ("NCHW", "NHWC")  # of image arrays

# --- Training ---

# Name -> its class in nn/quantizers.py.
QUANTIZERS = {"nested": "Nested", "dorefa": "DoReFa", "lsq": "Lsq"}
NESTING_QUANTIZERS = ("nested", "lsq")  # whose codes at k bits are the first k of 8: those that bit shifting can use

# Name -> where the scale between a layer's codes and its weights comes from.
SCALES = {"mean": "mean|w|, as in the paper", "learned": "a parameter per layer and width"}

# Name -> what the widths below the widest learn from; the widest learns from the labels, or from a recipe's teacher.
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

# --- Commands ---

ATTACKS = ("fgsm", "pgd")
ATTACK_SCALES = ("input", "pixel")  # what epsilon is measured in

PTQ_METHODS: dict[str, str] = {
    "bs": "bit shifting: the first k bits of nested 8-bit weights; norms of the float network",
    "bc": "bit shifting, and batch-norm statistics calibrated for each width",
    "aciq": "analytical clipping, bits per channel, bias correction (Banner et al., 2019)",
    "gptq": "nested codes of least error over all widths, a scale per channel and width, tuned to float's answers",
}

FIRST_LAST = ("float", "8bit")  # what `pack` makes of the first and the last layer

EXPERIMENT_SCALES = ("paper", "medium", "small", "tiny")
