"""Models that come with the package: NAME.apm, a model file, and NAME.json, its card, in this folder. No torch.

catalog.py turns names into paths and cards, and downloads models that are too large for the package; cli/models.py is
`anyprec models`; bench/ship_model.py makes both files from a training run.
"""
