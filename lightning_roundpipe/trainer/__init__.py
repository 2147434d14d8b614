"""The strategy's side of Lightning's Trainer: windows, evaluation, optimizer steps, checkpoints, machines.

The engine does not import this package, and `strategy` connects it with Lightning's interface.
"""
