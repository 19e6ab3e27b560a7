"""Training: quantizers, any-layers, conversion, joint training, calibration, evaluation. Needs torch."""
