"""Every number of the paper's tables, transcribed once, by table. Accuracies in percent, sizes in megabytes.

Yu, Li, Shi, Huang, Hua: "Any-Precision Deep Neural Networks", AAAI 2021; the appendix is that of arXiv 1911.07346.
Read by the experiments, which set their own numbers beside these.
"""

from __future__ import annotations

Numbers = tuple[float, ...]  # a row of tables 1, 3, 5 and 6: at 1, 2, 4, 8, 32 bit

# Table 1: row -> (dedicated, any-precision)
TABLE1: dict[str, tuple[Numbers, Numbers]] = {
    "CIFAR-10 ResNet-20": ((92.07, 93.55, 93.71, 93.66, 94.08), (92.15, 93.97, 93.95, 93.80, 93.98)),
    "CIFAR-10 AlexNet": ((92.56, 94.06, 94.02, 93.82, 93.74), (93.00, 94.08, 94.26, 94.24, 94.22)),
    "CIFAR-10 MobileNetV2": ((80.17, 89.69, 92.01, 92.44, 94.01), (80.06, 90.74, 92.27, 92.32, 93.84)),
    "SVHN ResNet-8": ((92.94, 95.91, 95.15, 94.64, 94.60), (91.65, 94.78, 95.46, 95.39, 95.36)),
    "SVHN CNN-8": ((90.94, 96.45, 97.04, 97.04, 97.10), (88.21, 94.94, 96.19, 96.22, 96.29)),
    "ImageNet ResNet-18": ((55.06, 63.65, 68.15, 68.48, 69.27), (54.62, 64.19, 67.96, 68.04, 68.16)),
    "ImageNet ResNet-50": ((61.08, 69.44, 71.24, 74.71, 75.95), (63.18, 73.24, 74.75, 74.91, 74.96)),
}

# Table 2: shared, then per width, then total; ResNet-50
TABLE2: dict[str, Numbers] = {
    "dedicated": (0.0, 22.3, 24.9, 30.1, 40.4, 102.4, 220.1),
    "any-precision": (102.0, 0.4, 0.4, 0.4, 0.4, 0.4, 104.0),
}

# Table 3: post-training quantization, ResNet-50 on ImageNet
TABLE3: dict[str, Numbers] = {
    "BS": (0.100, 0.136, 42.70, 74.68, 75.95),
    "BS+BC": (0.106, 0.352, 57.12, 73.73, 75.95),
    "ACIQ": (0.116, 0.324, 71.64, 75.83, 75.95),
    "any-precision": (63.18, 73.24, 74.75, 74.91, 74.96),
}

# Table 4: widths in training -> accuracy at 1..8 bit; ResNet-20 on CIFAR-10
TABLE4: dict[tuple[int, ...], Numbers] = {
    (1, 2, 4, 8): (91.80, 93.48, 93.22, 93.70, 93.58, 93.52, 93.53, 93.61),
    (1, 8): (91.95, 89.57, 92.97, 93.23, 93.35, 93.34, 93.36, 93.39),
    (2, 8): (10.00, 93.58, 93.50, 93.83, 93.91, 93.90, 94.00, 93.93),
    (4, 8): (10.00, 72.78, 93.22, 93.80, 93.75, 93.79, 93.81, 93.79),
}

# Table 5: row -> loss mode of ours -> accuracy
TABLE5: dict[str, dict[str, Numbers]] = {
    "CIFAR-10 ResNet-20": {
        "hard": (91.67, 93.72, 93.83, 93.94, 93.82),
        "recursive": (92.15, 93.97, 93.95, 93.80, 93.98),
    },
    "ImageNet ResNet-50": {
        "hard": (62.42, 72.88, 74.43, 74.68, 74.98),
        "recursive": (63.18, 73.24, 74.75, 74.91, 74.96),
    },
}

# Table 6: DeepLab V3 on Pascal VOC 2012 -> (dedicated, any-precision)
TABLE6: dict[str, tuple[Numbers, Numbers]] = {
    "mIoU": ((59.5, 71.5, 74.1, 75.6, 76.2), (61.3, 72.1, 74.3, 75.4, 75.9)),
    "pixel accuracy": ((89.7, 93.5, 94.2, 94.5, 94.6), (90.6, 93.7, 94.3, 94.4, 94.6)),
}

# Table 7 (appendix A.1): update compliance average; ResNet-20 on CIFAR-10, 50 epochs
UCA: dict[int, dict[int, float]] = {
    1: {1: 1.000, 2: 0.929, 4: 0.910, 8: 0.909, 32: 0.909},
    2: {2: 1.000, 4: 0.955, 8: 0.954, 32: 0.955},
    4: {4: 1.000, 8: 0.963, 32: 0.963},
    8: {8: 1.000, 32: 0.964},
    32: {32: 1.000},
}

# Table 8 (appendix A.2): accuracy under FGSM, step 0.007; attacked width -> accuracy at each defending width
FGSM_STEP = 0.007
FGSM: dict[int, Numbers] = {
    1: (75.65, 83.87, 84.78, 84.87, 84.25),
    2: (79.45, 74.91, 78.18, 78.77, 78.55),
    4: (81.22, 78.18, 72.93, 74.27, 75.85),
    8: (81.58, 78.65, 74.28, 73.32, 76.06),
    32: (81.95, 80.46, 78.26, 78.33, 75.41),
}
FGSM_DEDICATED: Numbers = (75.09, 72.80, 70.45, 70.23, 70.00)  # attacked and defended at the same width
