"""Cascades: few bits first, more only for inputs whose answer is unsure. `m(x, bits="auto")`; no torch.

cascade.py is what the file stores, answering.py runs it, calibrate.py chooses thresholds. FORMAT.md, section 5.
"""
