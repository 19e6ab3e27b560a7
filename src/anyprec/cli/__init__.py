"""The command `anyprec VERB ...`: dispatch.py finds the verb. Each verb is one file here: its options and its output.

A verb's file imports at its top only what is quick to import, never torch: `anyprec VERB --help` is answered at once.
"""

from anyprec.cli.dispatch import main

__all__ = ["main"]
