"""The three scales, as one table: which network, data and recipe stands for each row of the paper at each scale.

`paper` is the paper's own setting (the recipes as they stand, for GPUs), `small` real data on two CPU cores, `tiny`
embedded digits for tests. A row that is not run says why. The experiments ask here for trainings and know nothing else
of scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anyprec.choices import EXPERIMENT_SCALES
from anyprec.errors import AnyprecError
from anyprec.reproduce.store import Training, training
from anyprec.widths import DEFAULT_WIDTHS


@dataclass(frozen=True)
class PaperNetwork:
    """What stands for a row of the paper: a recipe, settings for all its trainings, more for dedicated models."""

    what: str  # "ResNet-8 on CIFAR-10"
    recipe: str
    settings: tuple[str, ...] = ()
    dedicated_settings: tuple[str, ...] = ()
    scaled: str = ""  # what was scaled down, in a sentence
    observe: int = 0  # steps between looks at the gradients of the widths, in the joint training as it stands here

    def joint(self, *more: str, after: Training | None = None) -> Training:
        plain = training(self.recipe, *self.settings, after=after)
        if not more:
            return replace(plain, observe=self.observe)
        changed = training(self.recipe, *self.settings, *more, after=after)
        return replace(changed, observe=self.observe if changed == plain else 0)

    def dedicated(self, bits: int, *more: str, after: Training | None = None) -> Training:
        # A weight on the loss of the only width would be a change of the learning rate.
        own = (f"widths=[{bits}]", "width_weights={}", *self.dedicated_settings)
        return training(self.recipe, *self.settings, *own, *more, after=after)

    def all_dedicated(self) -> dict[int, Training]:
        return {bits: self.dedicated(bits) for bits in DEFAULT_WIDTHS}


@dataclass(frozen=True)
class Segmentation:
    """What stands for Table 6. `backbone` is the classification network it starts from; None: from scratch."""

    net: PaperNetwork
    backbone: PaperNetwork | None = None
    compared: bool = True  # with dedicated models

    def joint(self) -> Training:
        return self.net.joint(after=self.backbone.joint() if self.backbone else None)

    def all_dedicated(self) -> dict[int, Training]:
        if not self.compared:
            return {}
        return {
            bits: self.net.dedicated(bits, after=self.backbone.dedicated(bits) if self.backbone else None)
            for bits in DEFAULT_WIDTHS
        }


# How the widths share weights in the recipe cifar10-resnet8-cpu, for the other small networks
SHARING = ("width_weights={1=2.0,2=0.5,32=3.0}", "sign_window=0.15")
# The authors' schedule for dedicated ImageNet models
IMAGENET_DEDICATED = ("epochs=120", "lr=0.1", "milestones=[30,60,85,95,105]")
TINY = ("limit=384", "epochs=2", "batch_size=64", "eval_every=0", "warmup_epochs=0.5")
NO_SVHN = "not run at this scale: SVHN is not at hand"
NO_IMAGENET = "not run at this scale: ImageNet is not at hand"

NETS: dict[str, dict[str, PaperNetwork | str]] = {
    "paper": {
        "CIFAR-10 ResNet-20": PaperNetwork("ResNet-20, 5 x wide, on CIFAR-10", "cifar10-resnet20", observe=100),
        "CIFAR-10 AlexNet": PaperNetwork("AlexNet on CIFAR-10", "cifar10-alexnet"),
        "CIFAR-10 MobileNetV2": PaperNetwork("MobileNetV2 on CIFAR-10", "cifar10-mobilenetv2"),
        "SVHN ResNet-8": PaperNetwork("ResNet-8 on SVHN", "svhn-resnet8"),
        "SVHN CNN-8": PaperNetwork("CNN-8 on SVHN", "svhn-cnn8"),
        "ImageNet ResNet-18": PaperNetwork("ResNet-18 on ImageNet", "imagenet-resnet18", (), IMAGENET_DEDICATED),
        "ImageNet ResNet-50": PaperNetwork("ResNet-50 on ImageNet", "imagenet-resnet50", (), IMAGENET_DEDICATED),
    },
    "small": {
        "CIFAR-10 ResNet-20": PaperNetwork(
            "ResNet-8 on CIFAR-10",
            "cifar10-resnet8-cpu",
            ("limit=20000", "epochs=5"),
            scaled="ResNet-8 with 16/32/64 channels in place of ResNet-20 with 80/160/320; 20,000 of the 50,000 "
            "training images; 5 epochs in place of 400.",
            observe=8,
        ),
        "CIFAR-10 AlexNet": PaperNetwork(
            "AlexNet, 1/4 wide, on CIFAR-10",
            "cifar10-alexnet-cpu",
            ("limit=20000", "epochs=4", "net_options.hidden=256", *SHARING),
            scaled="AlexNet with a quarter of its channels and hidden layers of 256; 20,000 training images; 4 "
            "epochs in place of 400.",
        ),
        "CIFAR-10 MobileNetV2": PaperNetwork(
            "MobileNetV2, 1/4 wide, on CIFAR-10",
            "cifar10-mobilenetv2-cpu",
            ("limit=5000", "epochs=4", "batch_size=64", *SHARING),
            scaled="MobileNetV2 with a quarter of its channels; 5,000 training images; 4 epochs in place of 400.",
        ),
        "SVHN ResNet-8": NO_SVHN + "; the first row is a ResNet-8",
        "SVHN CNN-8": PaperNetwork(
            "CNN-8 on CIFAR-10",
            "svhn-cnn8",
            ("data=cifar10", "limit=20000", "epochs=6", "lr=0.003", "schedule=cosine", "milestones=[]",
             "warmup_epochs=0.5", "quantizer=nested", "scale=learned", "loss=hard", "eval_every=0",
             "net_options.dropout=0.0", *SHARING),
            scaled="CNN-8 on CIFAR-10 (enlarged to 40x40) in place of SVHN, whose digits are much the easier images; "
            "20,000 training images; 6 epochs in place of 100.",
        ),
        "ImageNet ResNet-18": NO_IMAGENET,
        "ImageNet ResNet-50": NO_IMAGENET,
    },
    "tiny": {
        "CIFAR-10 ResNet-20": PaperNetwork(
            "ResNet-8 on digits", "digits", TINY, scaled="Everything: 8x8 digits and a few steps, to test the code.",
            observe=2,
        ),
        "CIFAR-10 AlexNet": PaperNetwork(
            "AlexNet, 1/8 wide, on digits",
            "cifar10-alexnet-cpu",
            ("data=digits", "augment=crop", *TINY, "net_options.multiplier=0.125", "net_options.hidden=32",
             "net_options.size=8"),
            scaled="AlexNet for 8x8 digits, a few steps.",
        ),
        "CIFAR-10 MobileNetV2": PaperNetwork(
            "MobileNetV2, 1/4 wide, on digits",
            "cifar10-mobilenetv2-cpu",
            ("data=digits", "augment=crop", *TINY, "limit=128", "epochs=1"),
            scaled="MobileNetV2 for 8x8 digits, two steps.",
        ),
        "SVHN ResNet-8": NO_SVHN,
        "SVHN CNN-8": PaperNetwork(
            "CNN-8, half as wide, on digits",
            "svhn-cnn8",
            ("data=digits", *TINY, "milestones=[]", "quantizer=nested", "scale=learned", "net_options.expand=1"),
            scaled="CNN-8 on digits enlarged to 40x40, a few steps.",
        ),
        "ImageNet ResNet-18": NO_IMAGENET,
        "ImageNet ResNet-50": NO_IMAGENET,
    },
}  # fmt: skip

SEGMENTATION: dict[str, tuple[Segmentation, ...]] = {
    "paper": (
        Segmentation(
            PaperNetwork("DeepLab V3 on ResNet-50, VOC 2012 and SBD", "voc-deeplab-resnet50"),
            backbone=PaperNetwork("ResNet-50 on ImageNet", "imagenet-resnet50", (), IMAGENET_DEDICATED),
        ),
    ),
    "small": (
        Segmentation(
            PaperNetwork(
                "DeepLab V3, small, on CamVid",
                "camvid-deeplab-cpu",
                scaled="DeepLab V3 on a ResNet of 32/64/128 channels in place of ResNet-50, trained from scratch on "
                "the 367 images of CamVid at 240x180 in place of ImageNet, VOC 2012 and SBD.",
            ),
        ),
        Segmentation(
            PaperNetwork(
                "DeepLab V3, small, on VOC animals",
                "camvid-deeplab-cpu",
                ("data=voc-animals", "augment=voc-128x128", "epochs=10"),
                scaled="The same network from scratch on the 976 images of VOC 2012 that show animals, at 256 "
                "pixels; 10 epochs; no dedicated models.",
            ),
            compared=False,
        ),
    ),
    "tiny": (
        Segmentation(
            PaperNetwork(
                "DeepLab V3, tiny, on made-up scenes",
                "camvid-deeplab-cpu",
                ("epochs=1", "batch_size=2", "augment=camvid-60x80", "warmup_epochs=0", "net_options.multiplier=0.5",
                 "net_options.pyramid=16"),
                scaled="Everything: four made-up images, two steps.",
            ),
        ),
    ),
}  # fmt: skip

# The network of tables 4 and 5, the gaps, update compliance and the attacks
DEFAULT_ROW = "CIFAR-10 ResNet-20"
# Images of the test set for what costs many passes each (iterated attacks); 0 is all
IMAGES = {"paper": 0, "small": 2000, "tiny": 100}
# Training batches, and images in each, that calibration looks at
CALIBRATION = {"paper": (20, 500), "small": (10, 500), "tiny": (4, 64)}


def check_scale(scale: str) -> str:
    if scale not in EXPERIMENT_SCALES:
        raise AnyprecError(f"--scale {scale!r} is not known; choose one of {', '.join(EXPERIMENT_SCALES)}")
    return scale


def nets(scale: str) -> dict[str, PaperNetwork | str]:
    """Row of the paper's Table 1 -> what stands for it, or why nothing does."""
    return NETS[check_scale(scale)]


def default_net(scale: str) -> PaperNetwork:
    net = nets(scale)[DEFAULT_ROW]
    assert isinstance(net, PaperNetwork)
    return net
