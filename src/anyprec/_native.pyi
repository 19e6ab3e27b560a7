"""Types of the C++ extension (native/bindings.cpp). Use it through `anyprec.run`, not directly."""

from collections.abc import Sequence

import numpy as np

def cpu_name() -> str: ...
def cpu_features() -> list[str]: ...
def known_isas() -> list[str]: ...
def built_isas() -> list[str]: ...
def isa() -> str: ...
def choose_isa(wish: str, features: Sequence[str], source: str = "ANYPREC_ISA") -> str: ...
def decode_cpuid(leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf7_1_eax: int, xcr0: int) -> list[str]: ...

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
    outputs: list[str]
    panel_bytes: int
    arena_bytes: int
    file_bytes: int
    @staticmethod
    def open(path: str, max_bits: int = 0, verify: bool = False, panel_budget: int = 0, isa: str = "") -> Model: ...
    def profiles(self) -> list[ProfileInfo]: ...
    def refresh(self) -> bool: ...
    def steps(self, x: np.ndarray, profile: int, repeat: int, threads: int, channels_first: bool) -> list[StepInfo]: ...
    def run(self, x: np.ndarray, profile: int, threads: int, channels_first: bool) -> list[np.ndarray]: ...
