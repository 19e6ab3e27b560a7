"""Packing: a trained any-precision module in, a Graph and a model file without torch out. Needs torch.

`anyprec.pack(model, "net.apm", example=x)`: trace.py (what runs, by recorder.py and operations/) -> lower.py (numbers
per profile) -> fold.py (fewer operations) -> packing.py (the file, the report) -> verify.py (file against module).
"""
