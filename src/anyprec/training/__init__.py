"""Training: recipes, the joint step over all widths, runs with checkpoints, evaluation. Needs torch.

recipe.py (what to do) -> run.py (the loop) -> joint.py (one step) -> checkpoint.py (what is kept).
"""
