"""The paper's analyses of a trained network: adversarial images, gradients by width, distributions. Needs torch."""

from anyprec.analysis.attack import Attack, attack_dedicated, attack_matrix
from anyprec.analysis.compliance import Compliance, compliance_table, train_observed
from anyprec.analysis.distributions import histogram, layer_histograms, toy_activations, truncate_weights

__all__ = [
    "Attack",
    "Compliance",
    "attack_dedicated",
    "attack_matrix",
    "compliance_table",
    "histogram",
    "layer_histograms",
    "toy_activations",
    "train_observed",
    "truncate_weights",
]
