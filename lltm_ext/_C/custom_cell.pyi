import torch

def source(
    program: str,
    dtype: torch.dtype,
    backward: bool,
    variant: int,
    fused_rows: int = 0,
    reset: str = "",
    independent_units: int = 0,
    small_batch: int = 0,
    single_step_rows: int = 0,
    on_tensor_cores: bool = False,
    dense: bool = False,
    block_threads: int = 0,
    stage: int = 0,
    heads: int = 1,
    large_tile: int = -1,
    narrow: bool = False,
) -> str: ...
def compile(
    program: str,
    dtype: torch.dtype,
    backward: bool,
    variant: int,
    architecture: str,
    fused_rows: int = 0,
    reset: str = "",
    independent_units: int = 0,
    small_batch: int = 0,
    single_step_rows: int = 0,
    on_tensor_cores: bool = False,
    dense: bool = False,
    block_threads: int = 0,
    stage: int = 0,
    heads: int = 1,
    large_tile: int = -1,
    narrow: bool = False,
) -> bytes: ...
def compilations() -> int: ...
def add_compiled_cell(arg0: str, arg1: int) -> None: ...
