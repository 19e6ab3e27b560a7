"""Names a user may choose from, each list written once: read by the command line and by the modules that do the work.

No torch here, so that `anyprec VERB --help` can list them at once. Choices inside a recipe are in training/recipe.py.
"""

LAYOUTS = ("NCHW", "NHWC")  # of image arrays

ATTACKS = ("fgsm", "pgd")
ATTACK_SCALES = ("input", "pixel")  # what epsilon is measured in

PTQ_METHODS: dict[str, str] = {
    "bs": "bit shifting: the first k bits of nested 8-bit weights; norms of the float network",
    "bc": "bit shifting, and batch-norm statistics calibrated for each width",
    "aciq": "analytical clipping, bits per channel, bias correction (Banner et al., 2019)",
}
NESTING_QUANTIZERS = ("nested", "lsq")  # whose codes at k bits are the first k of 8: those that bit shifting can use

EDGES = ("float", "8bit")  # what `pack` makes of the first and the last layer

EXPERIMENT_SCALES = ("paper", "small", "tiny")
