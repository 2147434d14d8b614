"""Weights that can be read a few at a time: from safetensors files, from a checkpoint, or from a model in memory.

What is read is a copy in memory that the caller may change. A file is open only while it is read, so that pages of it
that are mapped do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_roundpipe.messages import first_line
from lightning_roundpipe.model.weight_files import check_file, weight_files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Names of dtypes in headers of safetensors files."""


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def empty(self) -> Tensor:
        """Return such a tensor on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Source(Protocol):
    """Tensors by name."""

    @property
    def specs(self) -> Mapping[str, Spec]: ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of these tensors."""


class StateDict:
    """Tensors of a model in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name].detach().clone() for name in names}


class WeightFiles:
    """The weights in a folder: safetensors files, or ``pytorch_model*.bin``.

    Raises:
        ValueError: a file is missing, or cannot be read. The message begins with ``setting``.
    """

    def __init__(self, folder: Path, setting: str) -> None:
        self.folder, self.setting = folder, setting
        self.specs: dict[str, Spec] = {}
        self._homes: dict[str, Path] = {}
        with reading(folder, setting):
            files = weight_files(folder)
        for path, names in files.items():
            with reading(path, setting):
                check_file(path, names)
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (it is no mapping)
                        part = file.get_slice(name)
                        self._add(name, path, Spec(tuple(part.get_shape()), _DTYPES[part.get_dtype()]))
        for path in () if files else sorted(folder.glob("pytorch_model*.bin")):
            with reading(path, setting):
                for name, tensor in _mapped(path).items():
                    self._add(name, path, spec_of(tensor))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            wanted[self._homes[name]].append(name)
        found: dict[str, Tensor] = {}
        for path, here in wanted.items():
            with reading(path, self.setting):
                if path.suffix == ".bin":
                    mapped = _mapped(path)
                    found |= {name: mapped[name].clone() for name in here}
                    continue
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name).clone() for name in here}
        return found

    def _add(self, name: str, path: Path, spec: Spec) -> None:
        self.specs[name], self._homes[name] = spec, path


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.dtype)


def _mapped(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return tensors


@contextmanager
def reading(path: Path, setting: str, remedy: str = "copy or download it again") -> Iterator[None]:
    """Turn errors about a file into one that says which file it is, and what to do."""
    try:
        yield
    except Exception as error:
        size = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
        raise ValueError(
            f"{setting}: {path}{size} cannot be read: {first_line(error)}. It may be cut short; repair: {remedy}."
        ) from error
