"""Types of the C++ extension (native/program/bindings.cpp). Use it through `anyprec.run`, not directly."""

from collections.abc import Sequence
from typing import overload

import numpy as np

def all_finite(x: np.ndarray) -> bool: ...
def cpu_name() -> str: ...
def cpu_features() -> list[str]: ...
def known_isas() -> list[str]: ...
def built_isas() -> list[str]: ...
def isa() -> str: ...
def kernel_rates(isa: str) -> list[tuple[str, int, float]]: ...
def choose_isa(wish: str, features: Sequence[str], source: str = "ANYPREC_ISA") -> str: ...
def decode_cpuid(
    leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf7_edx: int, leaf7_1_eax: int, xcr0: int
) -> list[str]: ...
def decode_hwcap(hwcap: int, hwcap2: int) -> list[str]: ...
def json_numbers(x: np.ndarray) -> bytes: ...
def winograd_convolve(x: np.ndarray, kernel: np.ndarray, y: np.ndarray, threads: int, bf16: bool = False) -> None: ...
def winograd_kernel_gradient(
    x: np.ndarray, grad: np.ndarray, gradient: np.ndarray, threads: int, bf16: bool = False
) -> None: ...
def winograd_has_bf16() -> bool: ...

class CancelToken:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, timeout_s: float) -> None: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...

class ProfileInfo:
    name: str
    weight_bits: int
    act_bits: int
    accuracy: float
    available: bool
    bytes: int

class StepInfo:
    op: str
    work: str
    products: int
    seconds: float
    scalar: bool

class InputInfo:
    name: str
    shape: list[int]  # without N; 0 where free
    integer: bool

class Preprocessing:
    resize: str
    height: int
    width: int
    filter: str
    scale: list[float]
    shift: list[float]

class Model:
    name: str
    isa: str
    labels: list[str]
    input_height: int
    input_width: int
    input_channels: int
    image_height: int
    image_width: int
    takes_bytes: bool
    preprocessing: Preprocessing
    inputs: list[InputInfo]
    outputs: list[str]
    panel_bytes: int
    arena_bytes: int
    file_bytes: int
    loaded_bytes: int
    @staticmethod
    def open(
        path: bytes,
        max_bits: int = 0,
        verify: bool = True,
        panel_budget: int = 0,
        isa: str = "",
        keep_copy: bool = True,
    ) -> Model: ...
    def profiles(self) -> list[ProfileInfo]: ...
    def refresh(self) -> bool: ...
    def steps(
        self, x: Sequence[np.ndarray], profile: int, repeat: int, threads: int, channels_first: bool
    ) -> list[StepInfo]: ...
    def output_shapes(self, shapes: Sequence[Sequence[int]]) -> list[list[int]]: ...
    def run(
        self,
        x: Sequence[np.ndarray],
        profile: int,
        threads: int,
        channels_first: bool,
        check_finite: bool = True,
        cancel: CancelToken | None = None,
    ) -> list[np.ndarray]: ...
    def run_keeping(
        self,
        x: Sequence[np.ndarray],
        profile: int,
        threads: int,
        channels_first: bool,
        check_finite: bool = True,
        cancel: CancelToken | None = None,
    ) -> tuple[list[np.ndarray], KeptRun]: ...

class KeptRun:
    images: int
    def run(
        self, rows: np.ndarray, profile: int, threads: int, cancel: CancelToken | None = None
    ) -> list[np.ndarray]: ...
