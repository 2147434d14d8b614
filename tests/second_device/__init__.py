"""A device type that is not the CPU, and behaves as CUDA does in what the package can get wrong, on any machine.

`backend` is the device type, `play` puts it in the place of ``torch.cuda``. A process that has it once has it for good,
and torch then says that there is an accelerator, so ``test_second_device.py`` runs the tests of this folder in
processes of their own. By hand: ``SECOND_DEVICE=1 python -m pytest tests/second_device/test_steps.py``.
"""
