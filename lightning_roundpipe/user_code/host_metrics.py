"""Metrics of the user's module, on the host while its steps run on devices."""

from __future__ import annotations

from torch import Tensor, nn
from torchmetrics import Metric


class HostMetrics:
    """Keeps on the host what the metrics of a module accumulate while its steps run on devices.

    Predictions come from the device on which a microbatch ends, and targets from the host. Lightning computes a metric
    at the end of an epoch, outside the mode that brings them together, and a GPU would hold all of them until then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._changed = [m for m in self._metrics if not m.compute_on_cpu]
        for metric in self._changed:
            metric.compute_on_cpu = True  # torchmetrics moves lists to the host after each update

    def bring_to_host(self) -> None:
        """After a step: move tensors that an update has replaced (``self.total = self.total + x``) to the host."""
        for metric in self._metrics:
            for name, value in metric.metric_state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    setattr(metric, name, value.cpu())

    def end(self) -> None:
        """Restore the metrics' settings."""
        for metric in self._changed:
            metric.compute_on_cpu = False
