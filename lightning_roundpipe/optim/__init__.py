"""Steps the user's optimizer a few parameters at a time, with the numbers of ``optimizer.step()``.

``independence`` decides which optimizers allow that. ``hyperparameters`` takes a snapshot of their groups.
``partial_optimizer`` steps some of the parameters, with fused kernels where possible (``fused``), and calls these
without ``step()`` where that gives the same result (``direct``). ``clipping`` clips gradients as they arrive.
"""
