"""`anyprec bench`: a model file at every width beside other engines, in one interleaved run. Imports no torch itself.

timing.py and contestant.py (one engine in a process of its own) -> rivals.py, rival_torch.py (the others; twin.py
makes the float network they run) -> race.py (rounds in turn, the table) -> plot.py.
"""
