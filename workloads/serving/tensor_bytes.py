"""The bytes of a tensor on the host, and a tensor on given bytes, also in one of oneDNN's own layouts.

Such a tensor is opaque in Python. torch's ahead-of-time compiler writes packed constants to its files and maps them again:
by operators in torch's `mkldnn` namespace and a C function of its runtime (`torch/csrc/inductor/aoti_torch/c/shim.h`). Both
are for its own use, so `can_map_packed` tries them before anything relies on them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.serving.integer_linear import PackedCodes, can_multiply, packed_codes
from busbar.workloads.serving.linear import PackedLinear, packed


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Those of a tensor on the host, without a copy where it is contiguous; valid as long as the tensor."""
    if tensor.is_mkldnn:
        size = int(torch.ops.mkldnn._nbytes(tensor))
        address = int(torch.ops.mkldnn.data_ptr(tensor))
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    plain: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return plain


def description_of(tensor: torch.Tensor) -> str:
    """oneDNN's description of its layout, in hexadecimal digits; empty for a plain tensor."""
    if not tensor.is_mkldnn:
        return ""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).tolist()).hex()


def tensor_on(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], description: str
) -> torch.Tensor:
    """A tensor on this memory, uint8. Raises RuntimeError where oneDNN does not take it."""
    if not description:
        return memory.view(dtype).view(shape)
    library = _runtime()
    blob, handle = bytes.fromhex(description), ctypes.c_void_p()
    strides = torch.empty(shape, device="meta").stride()
    name = str(dtype).removeprefix("torch.")
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_int64(len(shape)),
        (ctypes.c_int64 * len(shape))(*shape),
        (ctypes.c_int64 * len(shape))(*strides),
        ctypes.c_int64(0),
        ctypes.c_int32(library[f"aoti_torch_dtype_{name}"]()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        (ctypes.c_uint8 * len(blob))(*blob),
        ctypes.c_int64(len(blob)),
    )
    if failed or handle.value is None:
        raise RuntimeError("oneDNN does not take the layout of packed weights")
    capsule = _capsule(handle.value)
    made: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
    made.__dict__["memory"] = memory  # it does not own what it lies on
    return made


@cache
def can_map_packed(codes: bool) -> bool:
    """Whether packed weights, floats or codes, give the same products here on a copy of their bytes."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn((rows, 64), generator=generator) for rows in (96, 5))
    try:
        return _codes_map(weight, x) if codes else _floats_map(weight, x)
    except (RuntimeError, AttributeError, NotImplementedError, OSError):
        return False


def _floats_map(weight: torch.Tensor, x: torch.Tensor) -> bool:
    first = packed(weight)
    return torch.equal(PackedLinear(first, None)(x), PackedLinear(_copy(first), None)(x))


def _codes_map(weight: torch.Tensor, x: torch.Tensor) -> bool:
    codes, digits = ((each * 30).round().clamp(-127, 127).to(torch.int8) for each in (weight, x))
    first, scale = packed_codes(codes), torch.ones(len(codes))
    one, other = (PackedCodes(each, scale).products()[0][1](digits) for each in (first, _copy(first)))
    return can_multiply() and torch.equal(one, other)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8)
    return tensor_on(memory, tensor.dtype, tuple(tensor.shape), description_of(tensor))


@cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _capsule(address: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, None, None)
