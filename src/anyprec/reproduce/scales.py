"""The scales, as one table: which network, data and recipe stands for each row of the paper at each scale.

`paper` is the paper's own setting (the recipes as they stand, for GPUs), `medium` CIFAR-10 in full with networks that
two CPU cores train in days, `small` part of it in two hours, `tiny` embedded digits for tests. A row that is not run
says why. The experiments ask here for trainings and know nothing else of scales.
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
    start: PaperNetwork | None = None  # a float stage: the trainings, joint and dedicated alike, begin with its weights

    def joint(self, *more: str, after: Training | None = None) -> Training:
        after = self.started(after)
        plain = training(self.recipe, *self.settings, after=after)
        if not more:
            return replace(plain, observe=self.observe)
        changed = training(self.recipe, *self.settings, *more, after=after)
        return replace(changed, observe=self.observe if changed == plain else 0)

    def dedicated(self, bits: int, *more: str, after: Training | None = None) -> Training:
        # A weight on the loss of the only width would be a change of the learning rate.
        own = (f"widths=[{bits}]", "width_weights={}", *self.dedicated_settings)
        return training(self.recipe, *self.settings, *own, *more, after=self.started(after))

    def started(self, after: Training | None) -> Training | None:
        return after if after is not None or self.start is None else self.start.joint()

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
# The VGG's recipes hold images out to choose settings by; here their figures are those of the test set. In float32, so
# that CPUs with and without bf16 train the same.
VGG = ("validation=0", "amp=off", "winograd=true")
CNN8_ON_CIFAR10 = (
    "data=cifar10", "lr=0.003", "schedule=cosine", "milestones=[]", "warmup_epochs=0.5", "quantizer=nested",
    "scale=learned", "loss=hard", "eval_every=0", "net_options.dropout=0.0",
)  # fmt: skip
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
    "medium": {
        "CIFAR-10 ResNet-20": PaperNetwork(
            "VGG, 64/128/128 channels, on CIFAR-10",
            "cifar10-vgg-small",
            (*VGG, "epochs=10", "eval_every=0"),
            scaled="A VGG of six convolutions with 64/128/128 channels in place of ResNet-20 with 80/160/320; 8 epochs "
            "in float, then 10 with the widths, in place of 400.",
            observe=50,
            start=PaperNetwork("the same in float", "cifar10-vgg-small-float", (*VGG, "eval_every=0")),
        ),
        "CIFAR-10 AlexNet": PaperNetwork(
            "AlexNet, 1/4 wide, on CIFAR-10",
            "cifar10-alexnet-cpu",
            ("limit=0", "epochs=20", "net_options.hidden=256", *SHARING),
            scaled="AlexNet with a quarter of its channels and hidden layers of 256; 20 epochs in place of 400.",
        ),
        "CIFAR-10 MobileNetV2": PaperNetwork(
            "MobileNetV2, 1/4 wide, on CIFAR-10",
            "cifar10-mobilenetv2-cpu",
            ("limit=0", "epochs=10", *SHARING),
            scaled="MobileNetV2 with a quarter of its channels; 10 epochs in place of 400.",
        ),
        "SVHN ResNet-8": PaperNetwork(
            "ResNet-8 on CIFAR-10",
            "cifar10-resnet8-cpu",
            ("epochs=20",),
            scaled="ResNet-8 on CIFAR-10 in place of SVHN, whose digits are much the easier images; 20 epochs in place "
            "of 100.",
        ),
        "SVHN CNN-8": PaperNetwork(
            "CNN-8 on CIFAR-10",
            "svhn-cnn8",
            (*CNN8_ON_CIFAR10, "epochs=20", *SHARING),
            scaled="CNN-8 on CIFAR-10 (enlarged to 40x40) in place of SVHN; 20 epochs in place of 100.",
        ),
        "ImageNet ResNet-18": NO_IMAGENET,
        "ImageNet ResNet-50": NO_IMAGENET,
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
            (*CNN8_ON_CIFAR10, "limit=20000", "epochs=6", *SHARING),
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

ON_CAMVID = (
    "DeepLab V3 on a ResNet of 32/64/128 channels in place of ResNet-50, trained from scratch on the 367 images of "
    "CamVid at 240x180 in place of ImageNet, VOC 2012 and SBD."
)
SEGMENTATION: dict[str, tuple[Segmentation, ...]] = {
    "paper": (
        Segmentation(
            PaperNetwork("DeepLab V3 on ResNet-50, VOC 2012 and SBD", "voc-deeplab-resnet50"),
            backbone=PaperNetwork("ResNet-50 on ImageNet", "imagenet-resnet50", (), IMAGENET_DEDICATED),
        ),
    ),
    "medium": (
        Segmentation(
            PaperNetwork("DeepLab V3, small, on CamVid", "camvid-deeplab-cpu", ("epochs=90",), scaled=ON_CAMVID),
        ),
    ),
    "small": (
        Segmentation(PaperNetwork("DeepLab V3, small, on CamVid", "camvid-deeplab-cpu", scaled=ON_CAMVID)),
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
IMAGES = {"paper": 0, "medium": 2000, "small": 2000, "tiny": 100}
# Training batches, and images in each, that calibration looks at
CALIBRATION = {"paper": (20, 500), "medium": (20, 500), "small": (10, 500), "tiny": (4, 64)}
# How often everything is trained, with another seed each time
SEEDS = {"paper": 1, "medium": 2, "small": 1, "tiny": 1}


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
